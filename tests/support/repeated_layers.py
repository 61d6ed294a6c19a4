"""Models of layers, most of which are alike, with the number that an export need not trace."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, DEPTH = 4, 6
X = torch.zeros(2, WIDTH, requires_grad=True)


class Layer(nn.Module):
    """A layer of a projection, a norm and a dropout, with its index."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(functional.silu(self.project(self.norm(x))))


class Stack(nn.Module):
    """Layers, one after the other."""

    def __init__(self, kind: Callable[[int], nn.Module] = Layer, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(index) for index in range(depth))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        model: makes it.
        count: number of layers that are not traced.
        options: of the export.
        args: arguments of forward.
    """

    model: Callable[[], nn.Module]
    count: int
    options: dict[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = (X,)


CASES: dict[str, Case] = {}


def case(name: str, count: int, *args: Any, **options: Any) -> Callable[[Any], Any]:
    def add(made: Any) -> Any:
        CASES[name] = Case(made, count, options, args or (X,))
        return made

    return add


def case_of_layer(name: str, count: int, **options: Any) -> Callable[[Any], Any]:
    def add(kind: Any) -> Any:
        CASES[name] = Case(lambda: Stack(kind), count, options)
        return kind

    return add


LEFT_OUT = DEPTH - 3
"""Number of layers that are not traced where all are alike: the first one is given a leaf."""

case("layers that are alike", LEFT_OUT)(Stack)
case("a loss", LEFT_OUT, loss=nn.MSELoss(), targets=(X,))(Stack)
case("mixed precision", DEPTH - 2, mixed_precision="bfloat16")(Stack)
case("opaque modules inside of some", 1, opaque=["layers.1.drop", "layers.4.project"])(Stack)
case("in evaluation mode", LEFT_OUT)(lambda: Stack().eval())
case("a sequence", LEFT_OUT)(lambda: nn.Sequential(*map(Layer, range(DEPTH))))
case("fewer layers than two that must agree", 0)(lambda: Stack(depth=2))


@case_of_layer("an index that is read", 0)
class Indexed(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.index)


@case_of_layer("an index that is read through the dict of attributes", 0)
class IndexedByDict(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + vars(self)["index"])


@case_of_layer("a stochastic depth of each layer", 0)
class StochasticDepth(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(super().forward(x), self.index / DEPTH)


@case_of_layer("a rate of a module inside", 0)
class Rate(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.drop = nn.Dropout(index / DEPTH)


@case_of_layer("a modulus of the index that is read", 0)
class Alternating(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.index % 2 else 1)


@case_of_layer("two kinds that alternate", 1)
class OfTwoKinds(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.is_local = bool(index % 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).cos() if self.is_local else super().forward(x)


@case_of_layer("a first layer of another class", DEPTH - 3)
def first_differs(index: int) -> nn.Module:
    return Layer(index) if index else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


@case_of_layer("a width that differs", 2)
class Wide(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        width = 8 if index == 1 else 6
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.down(self.up(x)))


@case_of_layer("frozen layers", 1)
class Frozen(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(index >= DEPTH // 2)


@case("the number of layers in arithmetic", LEFT_OUT)
class ByLength(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) / len(self.layers)
        return x


@case("an index that the loop uses", LEFT_OUT)
class Enumerated(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) * (index + 1)
        return x


@case("an index that layers are given", 0)
class Passed(Stack):
    def __init__(self) -> None:
        class Scaled(Layer):
            def forward(self, x: torch.Tensor, index: int = 0) -> torch.Tensor:
                return super().forward(x) * index

        super().__init__(Scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, index=index)
        return x


@case("layers in another order", LEFT_OUT)
class Backwards(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (3, 1, 0, 5, 4, 2):
            x = self.layers[index](x)
        return x


@case("results of all layers", LEFT_OUT)
class Collected(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x.mean())
        return x, torch.stack(found), found[2]


@case("layers that are called twice", 0)
class Twice(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


@case("a part of a layer that is called again", 0)
class PartAgain(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[4].norm(super().forward(x))


@case("a call of forward itself", 1)
class WithoutCall(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[5].forward(self.layers[0](self.layers[1](self.layers[2](
            self.layers[3](self.layers[4](x))))))  # fmt: skip


@case("results that are written", LEFT_OUT)
class WritesResults(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y.mul_(2)
        return x


@case("layers under torch.no_grad", 0)
class PartlyWithoutGradients(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with torch.set_grad_enabled(index > 2):
                x = layer(x)
        return x


@case("results of which one is not used everywhere", LEFT_OUT)
class TwoResults(Stack):
    def __init__(self) -> None:
        class Pair(Layer):
            def forward(self, x: torch.Tensor) -> Any:
                y = super().forward(x)
                return {"x": y, "sum": y.sum(), "none": None, "count": 3}

        super().__init__(Pair)

    def forward(self, x: torch.Tensor) -> Any:
        for index, layer in enumerate(self.layers):
            found = layer(x)
            x = found["x"] * found["count"]
            if index == 4:
                x = x + found["sum"]
        return x


@case("parameters tied across layers", LEFT_OUT)
class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.project.weight = self.layers[0].project.weight


@case("parameters tied in pairs of layers", LEFT_OUT)
class TiedPairs(Stack):
    def __init__(self) -> None:
        super().__init__()
        for index in range(1, DEPTH, 2):
            self.layers[index].norm.weight = self.layers[index - 1].norm.weight


@case("parameters tied inside of one layer", 2)
class TiedInOne(Stack):
    def __init__(self) -> None:
        class Double(Layer):
            def __init__(self, index: int) -> None:
                super().__init__(index)
                self.second = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(super().forward(x))

        super().__init__(Double)
        self.layers[3].second.weight = self.layers[3].project.weight


@case("a module that all layers share", 0)
class Shared(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.drop = self.layers[0].drop


@case_of_layer("buffers that forward updates", 0)
class Norms(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(WIDTH)


@case_of_layer("arguments that forward writes", 0)
class WritesArgument(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.is_leaf else x.add_(1)
        return super().forward(x)


@case_of_layer("a view of an argument that forward writes", 0)
class WritesView(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not x.is_leaf:
            x.view(-1)[:2].mul_(2)
        return y + x


@case_of_layer("own tensors that forward writes", LEFT_OUT)
class WritesOwn(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.mul_(2)
        return y.relu_() + 1


@case("masks and other tensors that all layers read", LEFT_OUT)
class Masked(Stack):
    def __init__(self) -> None:
        class Added(Layer):
            def forward(self, x: torch.Tensor, masks: Any) -> torch.Tensor:
                return super().forward(x) * masks["one"] + masks["two"][0]

        super().__init__(Added)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = {"one": x.abs(), "two": (x.mean(), None)}
        for layer in self.layers:
            x = layer(x, masks)
        return x


@case("a tensor that forward puts into an attribute for a time", 0)
class PutsTensor(Stack):
    def __init__(self) -> None:
        class Reading(Layer):
            mask: Any = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * self.mask

        super().__init__(Reading)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.mask = x.mean()
            x = layer(x)
            del layer.mask
        return x


@case("a number that forward puts into an attribute for a time", 0)
class PutsNumber(PutsTensor):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            layer.mask = index
            x = layer(x)
            del layer.mask
        return x
