"""Small models of all families on ranks: the unsharded model's numbers, the plan's collectives."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from _pytest.mark.structures import ParameterSet
from support.comparison import check_training
from support.long_cases import with_long
from support.meshes import slow_devices
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoshard.graph import export_model, load_graph
from autoshard.plan import Plan
from autoshard.planner import make_plan
from benchmarks.zoo.families import FAMILIES

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass
class Case:
    """One family in one precision on a mesh."""

    family: str
    dtype: torch.dtype
    axes: dict[str, int]
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        with precision(self.dtype):
            model, inputs = FAMILIES[self.family].build_small(self.dtype)
            graph = load_graph(export_model(model, (), inputs))
        plan = make_plan(graph, slow_devices(**self.axes))
        assert plan.found, plan.reason
        # A plan that needs no other rank would show nothing.
        assert plan.collectives
        self.plan = Plan.from_json(plan.to_json())

    def __call__(self) -> None:
        torch.manual_seed(0)
        with precision(self.dtype):
            model, inputs = FAMILIES[self.family].build_small(self.dtype)
            check_training(
                model,
                self.plan,
                kwargs=inputs,
                tolerance=TOLERANCES[self.dtype],
            )


class _AlwaysDouble(TorchFunctionMode):
    """Models ask for float32 where it matters to them; a double one must get double."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args, kwargs = pytree.tree_map(_doubled, (args, kwargs or {}))
        return function(*args, **kwargs)


def _doubled(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Everything inside computes in this element type."""
    if dtype is not torch.float64:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        with _AlwaysDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def cases(**axes: int) -> dict[str, Case]:
    """Every family in both precisions, by a name that says so."""
    return {
        f"{family} {str(dtype).removeprefix('torch.')} on {prod(axes.values())}": Case(
            family, dtype, axes
        )
        for family in FAMILIES
        for dtype in TOLERANCES
    }


def selected(
    known: Mapping[str, Case], usual: Sequence[str], more: Sequence[str] = ()
) -> list[ParameterSet]:
    """Parameters of a few families in float64, some of them long; of all in `make zoo-ranks`."""
    if "AUTOSHARD_EVERY_FAMILY" in os.environ:
        return with_long(known, known)
    ranks = next(iter(known)).rpartition(" ")[2]
    names = [[f"{family} float64 on {ranks}" for family in few] for few in (usual, more)]
    return with_long([*names[0], *names[1]], names[1])
