"""Small modules of which random models are composed; most read Python state in forward.

Each takes and returns activations of shape (rows, width). `CHANGES` has what a training loop may
do to one of them between two steps.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

GLOBALS = {"gain": 1.0}
"""Read by `Global`; `reset_globals` sets it back."""
GAIN = 1.0


def reset_globals() -> None:
    """Undo what changes of globals and classes have done."""
    global GAIN  # noqa: PLW0603  the habit is to set a global
    GAIN = 1.0
    GLOBALS["gain"] = 1.0
    Limited.limit = 4.0


def halved(h: Tensor) -> Tensor:
    """A function of a user's own."""
    return h * 0.5


class Divided(nn.Module):
    """Divides by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.unread = 2.0, 1.0

    def forward(self, h: Tensor) -> Tensor:
        """Divide."""
        return h / self.tau


class Flagged(nn.Module):
    """Has a branch that a flag selects."""

    def __init__(self) -> None:
        super().__init__()
        self.square = False

    def forward(self, h: Tensor) -> Tensor:
        """Add squares, if asked to."""
        return h + h.square() if self.square else h


class Containers(nn.Module):
    """Reads a list, a dict and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.names, self.pair = [1.0, 0.5], {"a": 1.0, "b": 2.0}, (1.0, 0.25)

    def forward(self, h: Tensor) -> Tensor:
        """Scale and shift."""
        return h * sum(self.scales) * self.names["a"] + self.pair[1]


@dataclass
class Config:
    """Settings of a block."""

    slope: float = 0.5
    power: int = 1
    unread: str = "x"


class Configured(nn.Module):
    """Reads objects that hold settings."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.options = Config(), SimpleNamespace(bias=0.125, unread=3)

    def forward(self, h: Tensor) -> Tensor:
        """Apply the settings."""
        return functional.leaky_relu(h, self.config.slope) ** self.config.power + self.options.bias


class Activated(nn.Module):
    """Has its activation function in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, h: Tensor) -> Tensor:
        """Apply the function."""
        return self.activation(h)


class Shifted(nn.Module):
    """Has a buffer that may be missing, and one that forward reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("shift", None)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, width))

    def forward(self, h: Tensor) -> Tensor:
        """Scale, and shift if there is something to shift by."""
        return h * self.gain if self.shift is None else h * self.gain + self.shift


class Moded(nn.Module):
    """Asks for its own mode."""

    def forward(self, h: Tensor) -> Tensor:
        """Scale in training."""
        return h * 1.5 if self.training else h


class Sized(nn.Module):
    """Computes with the number of rows."""

    def forward(self, h: Tensor) -> Tensor:
        """Scale by numbers that are made of sizes."""
        rows = h.shape[0]
        return h * (1.0 / rows) + h.sum(0) / rows**0.5 + h.clamp(max=3.0 - 1.0 / rows)


class Counting(nn.Module):
    """Updates buffers: a counter and a running mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        """Subtract the running mean."""
        self.calls += 1
        self.mean.lerp_(h.detach().mean(0), 0.1)
        return h - self.mean / self.calls


class Limited(nn.Module):
    """Reads an attribute of its class."""

    limit = 4.0

    def forward(self, h: Tensor) -> Tensor:
        """Clamp."""
        return h.clamp(-self.limit, self.limit)


class Global(nn.Module):
    """Reads globals of its file."""

    def forward(self, h: Tensor) -> Tensor:
        """Scale."""
        return h * GAIN * GLOBALS["gain"]


class Closed(nn.Module):
    """Calls a function that was made with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.curve = curve(0.25)

    def forward(self, h: Tensor) -> Tensor:
        """Apply the function."""
        return self.curve(h)


def curve(slope: float) -> Callable[[Tensor], Tensor]:
    """A function with a number in its closure."""
    return lambda h: torch.where(h > 0, h, h * slope)


class Residual(nn.Module):
    """A small network around which its input passes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, h: Tensor) -> Tensor:
        """Add what the network computes."""
        return h + self.down(functional.gelu(self.up(h)))


class Tied(nn.Module):
    """Uses one matrix twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, h: Tensor) -> Tensor:
        """Apply both layers."""
        return self.second(torch.tanh(self.first(h)))


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        """The symmetric part of a matrix."""
        return (weight + weight.T) / 2


def symmetric(width: int) -> nn.Module:
    """A layer whose matrix is computed from a parameter."""
    layer = nn.Linear(width, width)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def frozen(width: int) -> nn.Module:
    """A layer that is not trained."""
    return nn.Linear(width, width).requires_grad_(requires_grad=False)


def frozen_norm(width: int) -> nn.Module:
    """A batch norm that uses its running statistics while other modules train."""
    return nn.BatchNorm1d(width).eval()


def hooked(width: int) -> nn.Module:
    """A layer with a hook that the export traces."""
    layer = nn.Linear(width, width)
    layer.register_forward_hook(_half)
    return layer


def _half(_module: nn.Module, _args: object, result: Tensor) -> Tensor:
    return result * 0.5


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
    "bottleneck": lambda width: nn.Sequential(
        nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width, bias=False)
    ),
    "layer norm": nn.LayerNorm,
    "rms norm": nn.RMSNorm,
    "batch norm": nn.BatchNorm1d,
    "frozen batch norm": frozen_norm,
    "dropout without effect": lambda _: nn.Dropout(0.0),
    "dropout in evaluation": lambda _: nn.Dropout(0.5).eval(),
    "number": lambda _: Divided(),
    "flag": lambda _: Flagged(),
    "containers": lambda _: Containers(),
    "config": lambda _: Configured(),
    "activation": lambda _: Activated(),
    "buffers": Shifted,
    "mode": lambda _: Moded(),
    "sizes": lambda _: Sized(),
    "counter": Counting,
    "class": lambda _: Limited(),
    "globals": lambda _: Global(),
    "closure": lambda _: Closed(),
    "residual": lambda width: Residual(width, 16),
    "tied": Tied,
    "weight norm": lambda width: parametrizations.weight_norm(nn.Linear(width, width)),
    "weight norm of all": lambda width: parametrizations.weight_norm(
        nn.Linear(width, width), dim=None
    ),
    "parametrization": symmetric,
    "frozen": frozen,
    "hook": hooked,
}

Change = Callable[[Any, random.Random], object]
"""Changes a module."""


def set_global(_: nn.Module, _draw: random.Random) -> None:
    """Set a global that forward reads."""
    global GAIN  # noqa: PLW0603  the habit is to set a global
    GAIN = 2.0


def doubled(module: nn.Linear, h: Tensor) -> Tensor:
    """Another forward of a layer."""
    return 2 * functional.linear(h, module.weight, module.bias)


def _set(name: str, *values: Any) -> Change:
    """Set an attribute, or one of an object that the module has, to one of some values."""
    *path, last = name.split(".")

    def change(module: Any, draw: random.Random) -> None:
        for part in path:
            module = getattr(module, part)
        setattr(module, last, draw.choice(values))

    return change


def _shift(module: Shifted, _: random.Random) -> None:
    module.shift = torch.ones_like(module.gain)


CHANGES: dict[type, dict[str, Change]] = {
    nn.Module: {
        "mode of a module": lambda m, draw: m.train(draw.random() < 0.5),  # noqa: PLR2004
        "an attribute that nothing reads": _set("note", "a", 1, None),
        "a hook": lambda m, _: m.register_forward_hook(_half),
        "a hook that only looks": lambda m, _: m.register_forward_hook(lambda *_: None),
        "a hook before forward": lambda m, _: m.register_forward_pre_hook(
            lambda _, args: tuple(a * 2 for a in args)
        ),
        "a hook of backward": lambda m, _: m.register_full_backward_hook(
            lambda _m, _i, _o: (None,)
        ),
    },
    nn.Dropout: {"p": _set("p", 0.0, 0.5, 0.25), "p, equal": lambda m, _: setattr(m, "p", m.p)},
    nn.BatchNorm1d: {
        "momentum": _set("momentum", 0.5, 0.1, None),
        "eps": _set("eps", 1e-5, 0.1),
        "running statistics": lambda m, _: m.reset_running_stats(),
        "running mean": lambda m, _: m.running_mean.add_(0.5),
        "running mean, a row": lambda m, _: m.running_mean[0].fill_(2.0),
    },
    nn.LayerNorm: {"eps": _set("eps", 1e-5, 0.1)},
    Divided: {
        "number": _set("tau", 0.5, 2.0, 4),
        "number that nothing reads": _set("unread", 5.0),
        "number in vars": lambda m, draw: vars(m).update(tau=draw.choice((0.5, 2.0))),
        "number, deleted and set": lambda m, _: (delattr(m, "tau"), setattr(m, "tau", 3.0)),
        "number becomes a tensor": _set("tau", torch.tensor(2.0, dtype=torch.float64)),
    },
    Flagged: {"flag": _set("square", True, False, 1, 0)},
    Containers: {
        "list appended": lambda m, _: m.scales.append(1.0),
        "list element": lambda m, draw: m.scales.__setitem__(0, draw.choice((1.0, 3.0))),
        "list, equal": lambda m, _: setattr(m, "scales", [1.0, 0.5]),
        "list replaced": lambda m, _: setattr(m, "scales", [2.0]),
        "dict": lambda m, _: m.names.update(a=2.0),
        "dict entry that nothing reads": lambda m, _: m.names.update(b=9.0),
        "tuple": _set("pair", (1.0, 0.5), (1.0, 0.25)),
    },
    Configured: {
        "config": _set("config.slope", 0.5, 0.1),
        "config, an integer": _set("config.power", 1, 2),
        "config that nothing reads": _set("config.unread", "y"),
        "config replaced": lambda m, _: setattr(m, "config", replace(m.config, slope=0.3)),
        "config, equal": lambda m, _: setattr(m, "config", Config()),
        "namespace": _set("options.bias", 0.125, 1.0),
    },
    Activated: {
        "activation": _set("activation", torch.tanh, torch.relu, functional.silu, halved),
    },
    Shifted: {
        "a buffer from None": _shift,
        "a buffer replaced": lambda m, _: setattr(m, "gain", m.gain * 2),
        "a buffer written": lambda m, _: m.gain.mul_(0.5),
        "a row of a buffer": lambda m, _: m.gain[1:3].fill_(3.0),
        "a buffer's data": lambda m, _: m.gain.data[0].fill_(3.0),
    },
    Counting: {
        "a counter set": lambda m, _: m.calls.zero_(),
        "a buffer's row": lambda m, _: m.mean[:2].add_(1.0),
    },
    Limited: {
        "class": lambda _, draw: setattr(Limited, "limit", draw.choice((0.5, 4.0))),
        "class, on the instance": _set("limit", 0.25, 4.0),
    },
    Global: {
        "a global": set_global,
        "a global dict": lambda _, draw: GLOBALS.update(gain=draw.choice((1.0, 3.0))),
    },
    Closed: {"closure": lambda m, draw: setattr(m, "curve", curve(draw.choice((0.25, 0.75))))},
    nn.Linear: {
        "forward patched": lambda m, _: setattr(m, "forward", MethodType(doubled, m)),
        "bias removed": lambda m, _: setattr(m, "bias", None),
    },
    nn.Tanh: {"forward patched": lambda m, _: setattr(m, "forward", torch.relu)},
    nn.GELU: {"approximation": _set("approximate", "none", "tanh")},
    nn.Sequential: {
        "a layer replaced": lambda m, _: m.__setitem__(1, nn.ReLU()),
        "a layer appended": lambda m, _: m.append(nn.Tanh()),
        "a layer, equal": lambda m, _: m.__setitem__(1, type(m[1])()),
    },
}


def changes_of(module: nn.Module) -> dict[str, Change]:
    """What may be done to a module."""
    found: dict[str, Change] = {}
    for kind, changes in CHANGES.items():
        if isinstance(module, kind):
            found |= {f"{type(module).__name__}: {name}": c for name, c in changes.items()}
    return found
