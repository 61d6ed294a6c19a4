"""Numbers among the arguments of operators: dims, and what is computed from dynamic sizes."""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from runtime.cases.habits import assert_same, gradients
from runtime.cases.updated_buffers import MESHES
from support.comparison import device_mesh
from support.meshes import slow_devices
from support.size_formulas import ARGUMENTS, FEATURES, NUMBERS, Formula, Hidden
from torch import nn
from torch.export import Dim
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from autoshard.errors import PlanError
from autoshard.graph import export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize

BATCH = 8
UNSHARDED = ".*Such calls run the unsharded model on every rank"
ROWS = {"4": "S(0)", "2x2": "S(0),R"}
"""By mesh: the layout of the batch."""
COLUMNS = {"4": "S(1)", "2x2": "I,S(1)"}
"""By mesh: the layout of the weight."""
WHOLE = {"4": "R", "2x2": "R,R"}


def rows(size: int) -> torch.Tensor:
    """A batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)


@dataclass
class Sizes:
    """A planned model beside the same model on one device, for batches of several sizes.

    Attributes:
        mesh: its name.
        build: makes the model.
        sharded: sizes of the batches that run as planned.
        unsharded: sizes of those that run unsharded.
        dynamic: the dynamic batch size; None if the only size is the example's.
        layouts: of the batch, by mesh.
        pinned: layouts of parameters.
        reason: why a batch of another size is refused, if it must not run unsharded.
    """

    mesh: str
    build: Callable[[], nn.Module]
    sharded: tuple[int, ...] = (BATCH,)
    unsharded: tuple[int, ...] = ()
    dynamic: Any = None
    layouts: Mapping[str, str] = field(default_factory=lambda: ROWS)
    pinned: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        shapes = None if self.dynamic is None else ({0: self.dynamic},)
        archive = export_model(self.model(), (rows(BATCH),), dynamic_shapes=shapes)
        pins = {"inputs": {"*": self.layouts[self.mesh]}, "parameters": dict(self.pinned)}
        options = PlanOptions(pins=pins)
        self.plan = make_plan(load_graph(archive), slow_devices(**MESHES[self.mesh]), options)
        assert self.plan.found

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()

    def __call__(self) -> None:
        reference = self.model()
        planned = parallelize(deepcopy(reference), self.plan, device_mesh(self.plan))
        for size in self.sharded:  # a call that runs unsharded warns
            self.compare(planned, reference, size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", UNSHARDED)
            for size in self.unsharded:
                self.compare(planned, reference, size)
        if self.reason:
            mesh = device_mesh(self.plan)
            planned = parallelize(self.model(), self.plan, mesh, other_shapes="error")
            with pytest.raises(PlanError, match=self.reason):
                planned(rows(self.unsharded[0]))

    def compare(self, planned: nn.Module, reference: nn.Module, size: int) -> None:
        found, expected = planned(rows(size)), reference(rows(size))
        for result in (found, expected):
            result.sum().backward()
        assert_same(found, expected, f"result of {size}")
        assert_same(gradients(planned), gradients(reference), f"gradients of {size}")
        planned.zero_grad()
        reference.zero_grad()


class Squares(Hidden):
    """The sum of squares of each formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([result.square().sum() for result in super().forward(x).values()])


class Branching(nn.Linear):
    """Does something else for a number of rows that eight divides."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return (y if x.shape[0] % 8 else 2 * y).square().sum()


class OneRow(nn.Linear):
    """Does something else for one row."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return (2 * y if x.shape[0] == 1 else y).square().sum()


class Fixing(nn.Linear):
    """Gives an operator a number of the batch size that must be plain."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).quantile(1 / x.shape[0])


class EachRow(nn.Linear):
    """The loss of each row, of which those of an uneven number are counted."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = x[:, 0].gt(0).long()
        losses = functional.cross_entropy(super().forward(x), labels, reduction="none")
        return (losses * losses.detach()).sum() / x.shape[0]


PAIRS: dict[str, tuple[tuple[int, ...], Callable[..., torch.Tensor]]] = {
    "similarity of all pairs": (
        (16, FEATURES),
        lambda w, h: functional.cosine_similarity(w, h[:, None], dim=-1),
    ),
    "similarity, from the front": (
        (16, FEATURES),
        lambda w, h: functional.cosine_similarity(w, h[:, None], dim=2),
    ),
    "similarity with a vector": (
        (FEATURES,),
        lambda w, h: functional.cosine_similarity(w, h, dim=-1),
    ),
    "products": ((16, FEATURES), lambda w, h: torch.linalg.vecdot(w, h[:, None], dim=-1)),
    "products of rows": ((16, FEATURES), lambda w, h: torch.linalg.vecdot(w, h[:, None], dim=-2)),
    "joined with nothing": (
        (FEATURES,),
        lambda w, h: torch.cat([h.new_empty(0), h * w, h], dim=-2),
    ),
    "stacked": ((FEATURES,), lambda w, h: torch.stack([h * w, h], dim=-1)),
    "diagonals": ((FEATURES,), lambda w, h: torch.diag_embed(h * w, dim1=-3, dim2=-1)),
    "tiles": ((FEATURES,), lambda w, h: torch.tile(h * w, (3, 2))),
    "a contraction": ((2, FEATURES), lambda w, h: torch.tensordot(w, h, dims=([-1], [-1]))),
    "all of none": ((FEATURES,), lambda w, h: (h * w) * torch.any(h > 0, dim=())),
    "a maximum of a number": ((), lambda w, h: h * w.amax(-1)),
}


class Pairs(nn.Module):
    """Operators whose dims are not those of their first tensor."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [shape for shape, _ in PAIRS.values()]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.mix = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.mix
        results = [f(w, h) for w, (_, f) in zip(self.weights, PAIRS.values(), strict=True)]
        return torch.stack([result.square().sum() for result in results])


class WholeNorms(nn.Module):
    """Weight norms over all dims, over rows and over columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [weight_norm(nn.Linear(FEATURES, FEATURES), dim=dim) for dim in (None, 0, 1)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


def of_formulas(mesh: str, formulas: dict[str, Formula]) -> Sizes:
    return Sizes(
        mesh,
        lambda: Squares(formulas),
        (BATCH, 16, 12),
        (5, 3),
        Dim("batch", min=4, max=64),
        pinned={"weight": COLUMNS[mesh]},
    )


KINDS: dict[str, Callable[[str], Sizes]] = {
    "dims": lambda mesh: Sizes(mesh, Pairs),
    "weight norms": lambda mesh: Sizes(mesh, WholeNorms),
    "weight norms, unsharded": lambda mesh: Sizes(mesh, WholeNorms, layouts=WHOLE),
    "numbers of sizes": lambda mesh: of_formulas(mesh, NUMBERS),
    "arguments of sizes": lambda mesh: of_formulas(mesh, ARGUMENTS),
    "branches": lambda mesh: Sizes(
        mesh,
        Branching,
        (BATCH, 16),
        (12, 5, 1),
        Dim.AUTO,
        layouts=WHOLE,
        reason=r"sizes with x\.size\(\)\[0\] % 8 == 0, which is not true of these",
    ),
    "fixed sizes": lambda mesh: Sizes(
        mesh,
        Fixing,
        (BATCH,),
        (16, 5),
        Dim.AUTO,
        reason="Its dynamic sizes are fixed: the export allows no other sizes",
    ),
    "one row": lambda mesh: Sizes(
        mesh, OneRow, (BATCH, 16, 4), (1,), Dim("batch", max=64), layouts=WHOLE
    ),
    "losses of rows": lambda mesh: Sizes(
        mesh, EachRow, (BATCH, 16, 12), (5, 1), Dim("batch", max=64)
    ),
}
CASES = {f"{name}, {mesh}": kind(mesh) for mesh in MESHES for name, kind in KINDS.items()}
