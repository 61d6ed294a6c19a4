"""Models of layers that read or change Python state, added to the cases of `repeated_layers`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.repeated_layers import (
    CASES,
    DEPTH,
    LEFT_OUT,
    WIDTH,
    Case,
    Layer,
    Stack,
    case,
    case_of_layer,
)


class Settings:
    """Numbers that modules share."""

    def __init__(self) -> None:
        self.scale, self.scales = 1.5, [1.0, 2.0]


@case("settings that all layers share", LEFT_OUT)
class Configured(Stack):
    def __init__(self) -> None:
        class Scaled(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * self.settings.scale * self.settings.scales[1]

        super().__init__(Scaled)
        settings = Settings()
        for layer in self.layers:
            layer.settings = settings


@case("settings of each layer, of which one differs", 2)
class ConfiguredEach(Stack):
    def __init__(self) -> None:
        class Scaled(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * self.settings.scale

        super().__init__(Scaled)
        for layer in self.layers:
            layer.settings = Settings()
        self.layers[2].settings.scale = 7.0


@contextmanager
def scaled(settings: Any, scale: float) -> Iterator[None]:
    before = settings.scale
    settings.scale = scale
    try:
        yield
    finally:
        settings.scale = before


@case("settings that forward changes for some layers, and puts back", 1)
class Rescaled(Configured):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with scaled(layer.settings, 2.0 if index < 3 else 3.0):
                x = layer(x)
        return x


FLAGS = {"scale": 1.0}


@case("a global that forward changes for some layers, and puts back", 1)
class ByGlobal(Stack):
    def __init__(self) -> None:
        class Scaled(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * FLAGS["scale"]

        super().__init__(Scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            FLAGS["scale"] = 2.0 if index < 3 else 3.0
            x = layer(x)
        FLAGS["scale"] = 1.0
        return x


@case("a stack of states that forward fills and empties", 0)
class States(Stack):
    def __init__(self) -> None:
        class Counting(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.states.append(1)
                return super().forward(x) * len(self.states)

        super().__init__(Counting)
        states: list[int] = []
        for layer in self.layers:
            layer.states = states

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.layers[0].states.clear()
        return x


@case("an object that forward makes", 0)
class MadeInForward(Stack):
    def __init__(self) -> None:
        class Adding(Layer):
            def forward(self, x: torch.Tensor, found: Any) -> torch.Tensor:
                found.total += 1
                return super().forward(x) * found.total

        super().__init__(Adding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Found:
            total = 0

        found = Found()
        for layer in self.layers:
            x = layer(x, found)
        return x


@case("a list into which layers put tensors", 0)
class Appended(Stack):
    def __init__(self) -> None:
        class Appending(Layer):
            def forward(self, x: torch.Tensor, found: Any) -> torch.Tensor:
                y = super().forward(x)
                found.append(y.sum())
                return y

        super().__init__(Appending)

    def forward(self, x: torch.Tensor) -> Any:
        found: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x, found)
        return x, torch.stack(found)


@case("results of layers that hooks collect", 0)
class Closures(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        found: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, y: found.append(y * 2))
            for layer in self.layers
        ]
        x = super().forward(x)
        for hook in hooks:
            hook.remove()
        result = torch.stack(found)
        found.clear()
        return x, result


@case("parts of results beside a region without gradients", DEPTH - 2)
class Routed(Stack):
    def __init__(self) -> None:
        class Router(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                values, index = super().forward(x).topk(2)
                one, two = x.chunk(2, -1)
                return x + torch.cat([one, two], -1).gather(-1, index).sum() * values.sum()

        super().__init__(Router)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            first, second = (x.to(torch.float64) * 2).chunk(2, -1)
        x = super().forward(x * first.float().sum() + second.float().sum())
        third, fourth = x.chunk(2, -1)
        return third - fourth.to(torch.float64)


@case("hooks", 0)
class Hooked(Stack):
    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(partial(scale_by, index))


def scale_by(index: int, _: nn.Module, __: Any, result: torch.Tensor) -> torch.Tensor:
    return result * index


@case_of_layer("functions of each layer", LEFT_OUT)
class WithFunction(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.act = partial(functional.leaky_relu, negative_slope=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


@case_of_layer("functions that differ", 0)
class WithOwnFunction(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.act = partial(functional.leaky_relu, negative_slope=index / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


@case_of_layer("a lambda with the index", 0)
class WithLambda(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.act = lambda x: x * index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


@case_of_layer("numbers that become tensors", 0)
class WithConstant(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor(0.5)


@case("checkpoints", LEFT_OUT)
class Checkpointed(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@case("layers of layers", 0)
class Nested(Stack):
    def __init__(self) -> None:
        super().__init__(lambda _: Stack(), depth=3)


@case("layers that torch has", LEFT_OUT)
def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


CASES["layers that torch has"] = Case(encoder, LEFT_OUT, {}, (torch.zeros(2, 3, WIDTH),))


@case("names of inputs that nodes would have", 0)
class NamedInputs(Stack):
    def forward(self, add_4: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(add_4)


@case("lists of experts in layers", LEFT_OUT)
class Experts(Stack):
    def __init__(self) -> None:
        class Several(Layer):
            def __init__(self, index: int) -> None:
                super().__init__(index)
                self.experts = nn.ModuleList(Layer(i) for i in range(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + torch.stack([e(x) for e in self.experts]).sum(0)

        super().__init__(Several)
