"""Models with contexts around some of their layers, added to the cases of `repeated_layers`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from autoshard.torch_private import TorchDispatchMode
from tests.support.repeated_layers import DEPTH, LEFT_OUT, Layer, Stack, case
from tests.support.repeated_layers_with_state import CASES

__all__ = ["CASES"]

Around = Callable[[int], AbstractContextManager[Any]]
"""The context of a layer, by its index."""

LAST = DEPTH - 1
BEFORE_LAST = LEFT_OUT - 1
"""Number of layers that are not traced where the last one is another."""


class InContexts(Stack):
    """Layers, each in a context."""

    def __init__(self, around: Around, kind: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__(kind)
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with self.around(index):
                x = layer(x)
        return x


def around(name: str, count: int, kind: Callable[[int], nn.Module] = Layer) -> Callable[..., Any]:
    def add(made: Around) -> Around:
        case(name, count)(lambda: InContexts(made, kind))
        return made

    return add


class Scaling(TorchFunctionMode):
    """Multiplies results by a number, which it may count up."""

    def __init__(self, factor: float, step: float = 0.0) -> None:
        super().__init__()
        self.factor, self.step = factor, step

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        result: torch.Tensor = func(*args, **(kwargs or {}))
        if func is not functional.silu:
            return result
        self.factor += self.step
        return result * self.factor


class Rounding(TorchDispatchMode):
    """Passes operators on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def last_in(made: Callable[[], AbstractContextManager[Any]]) -> Around:
    return lambda index: made() if index == LAST else nullcontext()


around("a mode of functions for each layer", 0)(lambda index: Scaling(1.0 + index))
around("a mode of functions around the last layer", BEFORE_LAST)(last_in(lambda: Scaling(2.0)))
around("a mode of operators around the last layer", BEFORE_LAST)(last_in(Rounding))
around("a device of each layer", 0)(lambda _: torch.device("cpu"))
around("gradients that the last layer has not", BEFORE_LAST)(last_in(torch.no_grad))
around("inference mode around some layers", 1)(lambda index: torch.inference_mode(index > LEFT_OUT))
around("autocast that is off around the last layer", 0)(
    last_in(lambda: torch.autocast("cpu", enabled=False))
)
around("modes that are switched off for the last layer", BEFORE_LAST)(
    last_in(torch._C.DisableTorchFunction)
)
around("hooks for what the last layer saves", BEFORE_LAST)(
    last_in(lambda: saved_tensors_hooks(lambda x: x, lambda x: x))
)
around("forward-mode derivatives around the last layer", BEFORE_LAST)(
    last_in(forward_ad.dual_level)
)


@case("a mode of functions that counts", 0)
class Counted(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Scaling(1.0, 0.5):
            return super().forward(x)


@case("operations that are counted", 0)
class CountedOperations(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with FlopCounterMode(display=False) as counter:
            x = super().forward(x)
        return x * counter.get_total_flops()


@case("annotations of each layer", 0)
class Annotated(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with preserve_node_meta():
            for index, layer in enumerate(self.layers):
                with annotate({"index": index}):
                    x = layer(x)
        return x


@case("a hook of all modules for a time", BEFORE_LAST)
class HookedForATime(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == LAST:
                hook = register_module_forward_hook(lambda _, __, result: result * 2)
            x = layer(x)
        hook.remove()
        return x


@case("a transform of functions around the last layer", BEFORE_LAST)
class Transformed(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *others, last = self.layers
        for layer in others:
            x = layer(x)
        return torch.func.vmap(lambda y: last(x).sum(0) + y, randomness="same")(x)


class Asking(Layer):
    """A layer that asks torch for a state."""

    def __init__(self, index: int, ask: Callable[[], Any]) -> None:
        super().__init__(index)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(1 + self.ask() % 7)


class Autocast:
    """Autocast as C++ has it, which casts nothing on the meta device."""

    def __enter__(self) -> None:
        torch.set_autocast_enabled("cpu", True)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled("cpu", False)


class Seeded:
    """Another seed of random numbers."""

    def __enter__(self) -> None:
        self.before = torch.initial_seed()
        torch.manual_seed(self.before + 1)

    def __exit__(self, *_: object) -> None:
        torch.manual_seed(self.before)


def asked_for(name: str, ask: Callable[[], Any], made: Callable[[], Any]) -> None:
    around(name, BEFORE_LAST, lambda index: Asking(index, ask))(last_in(made))


asked_for(
    "an attention kernel that layers ask for",
    torch.backends.cuda.flash_sdp_enabled,
    lambda: sdpa_kernel([SDPBackend.MATH]),
)
asked_for("autocast that layers ask for", lambda: torch.is_autocast_enabled("cpu"), Autocast)
asked_for("a seed that layers ask for", torch.initial_seed, Seeded)


@case("a result that is asked for its function of autograd", 0)
class AskedForFunction(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if type(x.grad_fn).__name__.startswith("Add"):
                x = x * 2
        return x


@case("written results that are asked for their version", 0)
class AskedForVersion(Stack):
    def __init__(self) -> None:
        class Writing(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).mul_(2)

        super().__init__(Writing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x * (1 + x._version)
        return x


@case("a layer whose result nothing reads", LEFT_OUT)
class Unread(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(x)
            x = x if index == LAST else y
        return x
