"""Random small models, and plans that shard them over four ranks in random layouts."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.errors import OptionError
from autoshard.graph import Graph, export_model, load_graph
from autoshard.mesh import Axis, Device, Link, Mesh, Topology
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from benchmarks.habits.blocks import BLOCKS

MESHES: Mapping[str, Mapping[str, int]] = {"4": {"a": 4}, "2x2": {"a": 2, "b": 2}}
TOKENS, LENGTH = 20, 3
_MOST_TRIES = 6
"""Random pins are dropped, half of them at a time, until a plan obeys the others."""
_SLOW = Device("slow", {"float32": 1e7}, memory_bandwidth=1e8, memory=1 << 34)
"""So slow that it is worth sharding even small models."""


class Tower(nn.Module):
    """Features or tokens in; logits, or a loss, and perhaps a second result out.

    Args:
        drawn: what the model is.
    """

    def __init__(self, drawn: "Drawn") -> None:
        super().__init__()
        self.front: nn.Module = (
            nn.Embedding(TOKENS, drawn.width)
            if drawn.takes_tokens
            else nn.Linear(drawn.features, drawn.width)
        )
        self.blocks = nn.Sequential(*(BLOCKS[name](drawn.width) for name in drawn.blocks))
        self.head = nn.Linear(drawn.width, drawn.classes, bias=drawn.has_bias)
        self.results = drawn.results

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """Compute the results."""
        h = self.front(x)
        if h.ndim > 2:  # noqa: PLR2004  tokens
            h = h.mean(1)
        h = self.blocks(h)
        z = self.head(h)
        match self.results:
            case "loss":
                return functional.cross_entropy(z, y)
            case "two":
                return z, h
            case "dict":
                return {"logits": z, "norm": h.square().mean()}
        return z


@dataclass(frozen=True)
class Drawn:
    """What a random model is.

    Attributes:
        mesh: name of the mesh.
        rows: of the batch that is exported.
        features: of each row.
        width: of the activations.
        classes: of the logits.
        blocks: names of the blocks, see `BLOCKS`.
        results: "logits", "two", "dict" or "loss".
        takes_tokens: True if the input is token ids.
        has_bias: of the last layer.
        is_dynamic: True if the number of rows is exported as a dynamic size.
        is_training: the mode that is exported.
        has_both_modes: True if there is a plan for either mode.
        is_differentiable: True if the plan computes the gradient of the input.
    """

    mesh: str
    rows: int
    features: int
    width: int
    classes: int
    blocks: tuple[str, ...]
    results: str
    takes_tokens: bool
    has_bias: bool
    is_dynamic: bool
    is_training: bool
    has_both_modes: bool
    is_differentiable: bool

    @classmethod
    def of(cls, draw: random.Random) -> "Drawn":
        """Draw a model."""
        chance = draw.random
        return cls(
            mesh=draw.choice(list(MESHES)),
            rows=draw.choice((8, 8, 8, 12, 7, 6)),
            features=draw.choice((16, 10)),
            width=draw.choice((16, 16, 10)),
            classes=draw.choice((8, 12, 12, 5)),
            blocks=tuple(draw.choices(list(BLOCKS), k=draw.randint(1, 4))),
            results=draw.choices(("logits", "two", "dict", "loss"), (6, 2, 1, 1))[0],
            takes_tokens=chance() < 0.2,  # noqa: PLR2004
            has_bias=chance() < 0.7,  # noqa: PLR2004
            is_dynamic=chance() < 0.4,  # noqa: PLR2004
            is_training=chance() < 0.8,  # noqa: PLR2004
            has_both_modes=chance() < 0.25,  # noqa: PLR2004
            is_differentiable=chance() < 0.4,  # noqa: PLR2004
        )

    def build(self, *, training: bool | None = None) -> Tower:
        """The model, with the same weights each time, in the mode of the export."""
        torch.manual_seed(0)
        model = Tower(self).double()
        modes = {name: module.training for name, module in model.named_modules()}
        if not (self.is_training if training is None else training):
            return model.eval()
        for name, module in model.named_modules():
            module.training = modes[name]
        return model

    def inputs(self, number: int, rows: int | None = None) -> dict[str, Tensor]:
        """A batch, the same on all ranks; labels only for models that return a loss."""
        generator = torch.Generator().manual_seed(number)
        rows = self.rows if rows is None else rows
        x = (
            torch.randint(TOKENS, (rows, LENGTH), generator=generator)
            if self.takes_tokens
            else torch.randn(rows, self.features, dtype=torch.float64, generator=generator)
        )
        y = self.labels(number, rows)
        return {"x": x, "y": y} if self.results == "loss" else {"x": x}

    def labels(self, number: int, rows: int) -> Tensor:
        """Labels, of which some are ignored."""
        generator = torch.Generator().manual_seed(number + 1)
        y = torch.randint(self.classes, (rows,), generator=generator)
        if rows > 2:  # noqa: PLR2004
            y[number % rows] = -100
        return y

    def graph(self, *, training: bool) -> Graph:
        """The graph of the model in a mode."""
        inputs = self.inputs(0)
        if self.is_differentiable and not self.takes_tokens:
            inputs["x"].requires_grad_()
        sizes: dict[str, Any] | None = None
        if self.is_dynamic:
            rows = torch.export.Dim("rows", min=2, max=64)
            sizes = {name: {0: rows} for name in inputs}
        model = self.build(training=training)
        return load_graph(export_model(model, (), inputs, dynamic_shapes=sizes))

    def device_axes(self) -> Mesh:
        """The mesh, of slow devices on fast links."""
        links = (Link("fast", None, bandwidth=1e9, latency=1e-6),)
        topology = Topology("slow devices", _SLOW, links, backend="gloo")
        axes = tuple(Axis(name, size) for name, size in MESHES[self.mesh].items())
        return Mesh(axes, topology)


def plans_of(drawn: Drawn, draw: random.Random) -> dict[str, Plan]:
    """Plans of a model with random layouts: for the mode of the export, or for both."""
    first = drawn.graph(training=drawn.is_training)
    mesh = drawn.device_axes()
    names = _names(drawn)
    plan = _planned(first, mesh, _drawn_pins(drawn, names, draw))
    if not drawn.has_both_modes:
        return {"exported": plan}
    other = drawn.graph(training=not drawn.is_training)
    stored = plan.state_pins()
    return {"exported": plan, "other": make_plan(other, mesh, PlanOptions(pins=stored))}


def _names(drawn: Drawn) -> dict[str, list[tuple[str, int]]]:
    """What can be pinned: names by kind, with numbers of dims."""
    model = drawn.build()
    return {
        "inputs": [(name, value.ndim) for name, value in drawn.inputs(0).items()],
        "outputs": [("0", 0 if drawn.results == "loss" else 2)],
        "parameters": [(name, p.ndim) for name, p in model.named_parameters()],
        "buffers": [(name, b.ndim) for name, b in model.named_buffers()],
    }


Pin = tuple[str, str, str]
"""Kind, name and layout."""

_SHARES = {"inputs": 0.5, "outputs": 0.7, "parameters": 0.5, "buffers": 0.4}
"""How often each is pinned."""


def _drawn_pins(
    drawn: Drawn, names: Mapping[str, list[tuple[str, int]]], draw: random.Random
) -> list[Pin]:
    num_axes = len(MESHES[drawn.mesh])
    return [
        (kind, name, ",".join(_part(num_dims, draw) for _ in range(num_axes)))
        for kind, named in names.items()
        for name, num_dims in named
        if draw.random() < _SHARES[kind]
    ]


def _part(num_dims: int, draw: random.Random) -> str:
    return draw.choice(["I", "*", *(f"S({dim})" for dim in range(num_dims)), "S(*)"])


def _planned(graph: Graph, mesh: Mesh, pins: list[Pin]) -> Plan:
    """A plan with as many of the pins as possible, at once."""
    for _ in range(_MOST_TRIES):
        table: dict[str, dict[str, str]] = {}
        for kind, name, layout in pins:
            table.setdefault(kind, {})[name] = layout
        try:
            plan = make_plan(graph, mesh, PlanOptions(pins=table))
        except OptionError:
            plan = None
        if plan is not None and plan.found:
            return plan
        pins = pins[: len(pins) // 2]
    return make_plan(graph, mesh, PlanOptions())


@dataclass
class Planned:
    """A random model with its plans.

    Attributes:
        drawn: what the model is.
        plans: by name.
    """

    drawn: Drawn
    plans: dict[str, Plan] = field(repr=False)

    @classmethod
    def of(cls, draw: random.Random, like: Drawn | None = None) -> "Planned":
        """Draw a model and its layouts; one that takes and returns what another one does."""
        drawn = Drawn.of(draw)
        if like is not None:
            drawn = Drawn(
                **{
                    **vars(drawn),
                    **{name: getattr(like, name) for name in _ALIKE},
                    "results": "logits",
                    "has_both_modes": False,
                }
            )
        return cls(drawn, plans_of(drawn, draw))


_ALIKE = ("mesh", "rows", "features", "classes", "takes_tokens", "is_dynamic", "is_training")


def plain_tower(drawn: Drawn) -> nn.Module:
    """A network that is never planned, on the same inputs."""
    torch.manual_seed(1)
    if drawn.takes_tokens:
        return nn.Sequential(
            nn.Embedding(TOKENS, 7), nn.Flatten(), nn.Linear(7 * LENGTH, drawn.classes)
        ).double()
    return nn.Sequential(
        nn.Linear(drawn.features, 9), nn.Tanh(), nn.Linear(9, drawn.classes)
    ).double()


def leaves(results: Any) -> Iterator[Tensor]:
    """The tensors of results."""
    if isinstance(results, Tensor):
        yield results
    else:
        for result in results.values() if isinstance(results, dict) else results:
            yield from leaves(result)
