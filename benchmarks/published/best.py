"""The optimizer's layouts for the largest dense runs, compared with the published ones."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod

from autoshard.errors import AutoshardError
from autoshard.mesh import make_mesh
from autoshard.plan.options import PlanOptions
from autoshard.plan.predictions import Costs
from autoshard.planner import make_plan
from benchmarks.published.layouts import InexpressibleError, Request, request_of
from benchmarks.published.predictions import Prediction
from benchmarks.published.programs import program
from benchmarks.published.public_models import has_experts

_TIME_LIMIT = 20.0
"""Seconds of a search."""
_CLEAR = 0.01
"""Relative gain from which a choice is called faster; the gap of plans is about as large."""
_PIPELINE = "pp"
_OF_PIPELINES = ("stages", "stages_per_rank", "schedule", "balance", "cuts")
"""Options about pipelines."""


@dataclass(frozen=True)
class Choice:
    """A published layout, and the optimizer's choice on the same mesh.

    Attributes:
        one: the prediction of the published layout.
        layout: the axes of the mesh.
        published: predicted seconds of what was planned, in the published layout.
        chosen: the same in the optimizer's choice.
        saved: the costs that are less in the choice, most first; empty if none.
    """

    one: Prediction
    layout: str
    published: float
    chosen: float
    saved: str

    @property
    def gain(self) -> float:
        """Share by which the predicted step is shorter; 0 if the published layout is as fast."""
        return max(1 - self.chosen / self.published, 0.0)


def largest_dense(predictions: Iterable[Prediction], number: int) -> list[Prediction]:
    """The predicted dense training runs of most parameters, then GPUs; each layout once."""
    dense = [
        one
        for one in predictions
        if one.ratio is not None and not has_experts(one.row) and _size(one)[0]
    ]
    found: dict[tuple[object, ...], Prediction] = {}
    for one in sorted(dense, key=_size, reverse=True):
        request = request_of(one.row)
        options = request.options.model_dump_json(
            exclude={"runtime": {"bucket_bytes", "expert_launch"}}
        )
        found.setdefault((request.dims, request.batch, request.mesh, options), one)
    return list(found.values())[:number]


def _size(one: Prediction) -> tuple[float, int]:
    text = one.row.texts.get("params_B", "")
    parameters = float(text) if text.replace(".", "", 1).isdigit() else 0.0
    return parameters, one.row.number("gpus") or 0


def choose(
    predictions: Iterable[Prediction],
    *,
    time_limit: float,
    report: Callable[[str], None] = lambda _: None,
) -> list[Choice]:
    """The optimizer's choices on the meshes of published runs.

    Args:
        predictions: of published layouts.
        time_limit: seconds after which no further run is planned.
        report: called with a line for each run.
    """
    end = time.time() + time_limit
    found = []
    for one in predictions:
        if time.time() > end:
            report(f"{one.row.id}: not planned within the time limit of the run")
            continue
        try:
            choice = _choice(one)
        except (AutoshardError, InexpressibleError) as error:
            report(f"{one.row.id}: {error}")
            continue
        found.append(choice)
        report(f"{one.row.id}: {choice.gain:.1%} shorter")
    return found


def _choice(one: Prediction) -> Choice:
    request = share_of_rank(request_of(one.row))
    graph = program(request.dims, request.batch, request.reduce_dtype)
    published = make_plan(graph, request.mesh, request.options)
    if published.costs is None or published.memory is None:
        raise InexpressibleError(f"not planned: {published.reason}")
    budget = max(request.mesh.topology.device.memory, published.memory.peak)
    changes = {"algo": "optimal", "distributed_optimizer": False, "memory_budget": budget}
    options = request.options.with_values(**changes, time_limit=_TIME_LIMIT)
    plan = make_plan(graph, request.mesh, options)
    layout = " ".join(f"{axis.name}{axis.size}" for axis in request_of(one.row).mesh.axes)
    seconds = published.costs.total
    if plan.costs is None or plan.costs.total > (1 - _CLEAR) * seconds:
        return Choice(one, layout, seconds, seconds, "")
    return Choice(one, layout, seconds, plan.costs.total, _saved(published.costs, plan.costs))


def share_of_rank(request: Request) -> Request:
    """The request for one pipeline rank alone: its layers, with embedding and head."""
    axes = {axis.name: axis.size for axis in request.mesh.axes if axis.name != _PIPELINE}
    ranks = prod(axis.size for axis in request.mesh.axes if axis.name == _PIPELINE)
    if ranks == 1:
        return request
    axes = axes or {"dp": 1}
    mesh = make_mesh(tuple(axes.values()), axes=tuple(axes), topology=request.mesh.topology)
    defaults = {name: PlanOptions().value(name) for name in _OF_PIPELINES}
    return replace(
        request,
        dims=request.dims.shortened(max(request.dims.layers // ranks, 1)),
        mesh=mesh,
        options=request.options.with_values(**defaults),
    )


def _saved(published: Costs, chosen: Costs) -> str:
    """The costs that become less, most first."""
    names = ("compute", "communication", "optimizer", "recompute")
    saved = {name: getattr(published, name) - getattr(chosen, name) for name in names}
    saved["overlap"] = chosen.overlapped - published.overlapped
    least = _CLEAR * published.total
    less = sorted((name for name in saved if saved[name] > least), key=lambda name: -saved[name])
    return ", ".join(less)


def choice_table(choices: Iterable[Choice]) -> str:
    """The choices as a table in Markdown."""
    lines = [
        "| row | model | GPUs | layout | published | predicted | gain | less time for |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    return "\n".join([*lines, *map(_line, choices)])


def _line(choice: Choice) -> str:
    row = choice.one.row
    gain = f"{choice.gain:.1%}" if choice.gain else "none"
    return (
        f"| {row.id} | {row['model']} | {row['gpus']} {row['gpu_type']} | {choice.layout} | "
        f"{row.seconds:.4g} s | {choice.one.seconds:.4g} s | {gain} | {choice.saved} |"
    )
