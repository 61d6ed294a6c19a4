"""Models whose forward reads Python state: numbers, flags, functions, modes and globals."""

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

FEATURES, HIDDEN = 16, 32

FACTOR = 1.0


class Net(nn.Module):
    """Two linear layers, with what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.middle(self.up(x))).square().mean()


class Between(Net):
    """Has modules between the layers."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*modules)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(h)


@dataclasses.dataclass
class Config:
    tau: float = 1.0
    unread: float = 1.0


class Holding(Net):
    """Reads many kinds of state."""

    limit = 4.0

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.unread = 2.0, 1.0
        self.aux = False
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.register_buffer("shift", None)
        self.scales, self.names = [1.0, 2.0], {"a": 1.0}
        self.config, self.options = Config(), SimpleNamespace(power=1.0, unread=1)
        self.epoch = 0
        self.curve, self.second = curve(1.0), curve(1.0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        h = self.activation(h / self.tau).clamp(max=self.limit) * FACTOR
        if self.aux:
            h = h + h.square()
        if self.shift is not None:
            h = h + self.shift
        h = h * sum(self.scales) * self.names["a"] * self.config.tau
        h = self.second(self.curve(h)) * self.options.power
        return h if self.epoch < 2 else h * 0.5


def curve(slope: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: functional.leaky_relu(h, slope)


class Asking(Net):
    """Asks for a mode itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        if self.how == "training":
            return h * 3 if self.training else h
        if self.how == "dropout":
            return functional.dropout(h, 0.5, self.training)
        return h * 3 if torch.is_grad_enabled() else h


def frozen_norm() -> nn.Module:
    model = Between(nn.BatchNorm1d(HIDDEN))
    model.inner[0].eval()
    return model


def set_global(_: nn.Module, value: float = 5.0) -> None:
    globals()["FACTOR"] = value


class Tempered(Net):
    """Reads numbers from buffers, which a loop may change."""

    def __init__(self, tau: torch.Tensor | None = None, shift: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("tau", tau)
        self.register_buffer("shift", shift)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(h if self.tau is None else h / self.tau)
        return h if self.shift is None else h + self.shift


class Counting(Net):
    """Counts its calls in a number, or in a buffer."""

    def __init__(self, *, in_buffer: bool = False) -> None:
        super().__init__()
        if in_buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        else:
            self.calls = 0

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(h) * self.calls


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return h * self.calls


class Dropping(Net):
    """Leaves a layer out at random, or as an argument says."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        h = self.up(x)
        if keep is not None:
            h = torch.where(keep, torch.tanh(h), h)
        elif self.draw() < 0.5:
            h = torch.tanh(h)
        return self.down(h).square().mean()


def modes_without_effect() -> nn.Module:
    norm = nn.BatchNorm1d(HIDDEN, track_running_stats=False)
    linear = parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))
    return Between(nn.Dropout(0.0), norm, linear, nn.Tanh())
