"""Exports in which repeated layers are not traced again equal those in which all are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoshard import export_model, load_graph
from autoshard.graph.export.repetition import repeated
from autoshard.graph.export.repetition.repeated import Repetition
from autoshard.graph.serialise import graph_to_json

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


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of layers that were not traced, of each archive that was lengthened."""
    found: list[int] = []
    plain = Repetition.lengthened

    def lengthened(self: Repetition, archive: bytes) -> bytes:
        found.append(len(self.repeated))
        return plain(self, archive)

    monkeypatch.setattr(Repetition, "lengthened", lengthened)
    return found


def export_in_full(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> bytes:
    with monkeypatch.context() as patch:
        patch.setattr(repeated, "_FEWEST", 1_000_000)
        return export_model(*args, **options)


@pytest.mark.parametrize("name", CASES)
def test_the_export_is_that_in_which_each_layer_is_traced(
    name: str, left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CASES[name]
    model = found.model()
    archive = export_model(model, found.args, **found.options)
    assert sum(left_out) == found.count
    whole = export_in_full(monkeypatch, model, found.args, **found.options)
    assert graph_to_json(load_graph(archive)) == graph_to_json(load_graph(whole))
    assert archive == whole


def test_an_export_in_full_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "autoshard"):
        export_model(CASES["layers that are called twice"].model(), (X,))
    assert "each layer is traced" in caplog.text
    assert "layers.3 is called again" in caplog.text
