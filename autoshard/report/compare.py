"""The difference of two plans of one program."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autoshard.errors import PlanError
from autoshard.lowering.timeline import KINDS
from autoshard.mesh import mesh_text
from autoshard.mesh.nodes import describe_devices
from autoshard.plan.document import Plan
from autoshard.plan.modules import stage_modules
from autoshard.plan.predictions import CollectiveCount, Costs, Performance
from autoshard.plan.sub_meshes import stage_devices

_COSTS = ("compute", "communication", "optimizer", "recompute", "overlapped", "idle", "total")
_MEMORY = (*KINDS, "peak")

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor or operator with different layouts in two plans.

    Attributes:
        name: name of the input or node, or position of the output.
        before: its layouts in the first plan.
        after: its layouts in the second plan.
    """

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class CollectiveChange:
    """Collectives of one kind, axis and direction whose number or bytes differ in two plans.

    Attributes:
        kind: such as all_gather.
        axis: name of the mesh axis.
        direction: forward or backward.
        before: number of collectives in the first plan.
        after: number of collectives in the second plan.
        bytes_before: their total bytes in the first plan.
        bytes_after: their total bytes in the second plan.
    """

    kind: str
    axis: str
    direction: str
    before: int
    after: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of both plans, in seconds or bytes."""

    name: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The differences of two plans of one program.

    Attributes:
        meshes: axes of both, such as ("dp=2 x tp=4", "tp=8").
        settings: devices, nodes and links, and options, that differ; the batch is of the program.
        inputs: parameters, buffers and user inputs with different layouts.
        nodes: operators with different layouts of inputs or outputs.
        outputs: outputs with different layouts.
        collectives: collectives whose number or bytes differ.
        pipeline: schedule, and stages with other devices or another first operator, if one of the
            plans is a pipeline.
        costs: seconds by kind.
        memory: bytes per device at the peak by kind.
        performance: throughput of both, and the errors of their predicted step times.
    """

    meshes: tuple[str, str]
    inputs: tuple[Change, ...]
    nodes: tuple[Change, ...]
    outputs: tuple[Change, ...]
    collectives: tuple[CollectiveChange, ...]
    costs: tuple[Figure, ...]
    memory: tuple[Figure, ...]
    pipeline: tuple[Change, ...] = ()
    settings: tuple[Change, ...] = ()
    performance: tuple[Performance | None, Performance | None] = (None, None)

    @property
    def is_empty(self) -> bool:
        """True if both plans are equal and on equal meshes."""
        same_mesh = self.meshes[0] == self.meshes[1]
        changes = (self.inputs, self.nodes, self.outputs, self.collectives, self.pipeline)
        figures = (*self.costs, *self.memory)
        return same_mesh and not any(changes) and not any(f.difference for f in figures)


def compare_plans(before: Plan, after: Plan) -> PlanDifference:
    """Compare two plans of one program; the meshes may differ.

    Raises:
        PlanError: the plans are for different programs, or one of the documents has no plan.
    """
    for which, plan in (("first", before), ("second", after)):
        if not plan.found:
            raise PlanError(f"the {which} document has no plan to compare: {plan.reason}")
    if before.graph.digest != after.graph.digest:
        raise PlanError("the plans are for different graphs; compare two plans for one graph")
    return PlanDifference(
        meshes=(mesh_text(before.mesh), mesh_text(after.mesh)),
        inputs=_changes(_inputs(before), _inputs(after)),
        nodes=_changes(_nodes(before), _nodes(after)),
        outputs=_changes(_outputs(before), _outputs(after)),
        collectives=tuple(collective_changes(before.collectives, after.collectives)),
        pipeline=_changes(_pipeline(before), _pipeline(after)),
        settings=_setting_changes(before, after),
        performance=(before.performance, after.performance),
        costs=_costs(before.costs, after.costs),
        memory=_figures(_MEMORY, before.memory, after.memory),
    )


def _setting_changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    found = _changes(_settings(before), _settings(after))
    ours, theirs = before.mesh.topology, after.mesh.topology
    if ours != theirs and found[:1] and found[0].name in {"devices", "topology"}:
        return found
    same = () if ours == theirs else (Change("topology", ours.name, "the same with other figures"),)
    return (*same, *found)


def _settings(plan: Plan) -> dict[str, str]:
    """Devices, nodes and links in words, and the options by keyword."""
    # That it was assumed makes no difference.
    topology = replace(plan.mesh.topology, assumed=None)
    devices = describe_devices(topology, plan.mesh.num_devices)
    options = {name: str(plan.options.value(name)) for name in plan.options.keywords()}
    return {"devices": devices, "topology": topology.name, **options}


def _inputs(plan: Plan) -> dict[str, str]:
    """Layouts by name; those of a value that several stages hold, one after the other."""
    placed = ((i.target, i.layout) for s in plan.stages for i in s.inputs if i.kind != "received")
    return _joined(placed)


def _nodes(plan: Plan) -> dict[str, str]:
    return _joined(
        (node.name, f"{' '.join(node.inputs)} -> {' '.join(node.outputs)}".strip())
        for stage in plan.stages
        for node in stage.nodes
    )


def _joined(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """All different texts of each name."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        if text not in found.setdefault(name, []):
            found[name].append(text)
    return {name: " and ".join(texts) for name, texts in found.items()}


def _outputs(plan: Plan) -> dict[str, str]:
    """Layouts by position of results, and by name of updated buffers."""
    if plan.pipeline is None:
        return {str(o.position): o.layout for o in plan.stages[0].outputs}
    updated = {
        f"update of {o.updates}": o.layout
        for stage in plan.stages
        for o in stage.outputs
        if o.updates is not None
    }
    results = (o for o in plan.stages[-1].outputs if o.updates is None)
    return {str(o.position): o.layout for o in results} | updated


def _pipeline(plan: Plan) -> dict[str, str]:
    """Schedule and stages; empty for a plan of one stage."""
    if plan.pipeline is None:
        return {}
    pipeline = plan.pipeline
    found = {
        "schedule": pipeline.schedule,
        "ranks": str(len(pipeline.ranks)),
        "micro-batches": str(pipeline.micro_batches),
    }
    for number, (stage, modules) in enumerate(zip(plan.stages, stage_modules(plan), strict=True)):
        devices = stage_devices(stage)
        found[f"stage {number}"] = (
            f"{modules.first} to {modules.last} on devices {devices.start} to {devices[-1]}"
        )
    return found


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    return tuple(
        Change(name, old, new) for name, old, new in _pairs(before, after, "") if old != new
    )


def _pairs(
    before: Mapping[Key, Value], after: Mapping[Key, Value], missing: Value
) -> Iterable[tuple[Key, Value, Value]]:
    """Both values of every key, in the order of the first mapping, then of the second."""
    for key in dict.fromkeys((*before, *after)):
        yield key, before.get(key, missing), after.get(key, missing)


def collective_changes(
    before: Iterable[CollectiveCount], after: Iterable[CollectiveCount]
) -> Iterable[CollectiveChange]:
    """The collectives whose number or bytes differ."""
    first, second = (
        {(c.kind, c.axis, c.direction): (c.count, c.nbytes) for c in counts}
        for counts in (before, after)
    )
    for (kind, axis, direction), old, new in _pairs(first, second, (0, 0)):
        if old != new:
            yield CollectiveChange(kind, axis, direction, old[0], new[0], old[1], new[1])


def _costs(before: Costs | None, after: Costs | None) -> tuple[Figure, ...]:
    """Seconds by kind; those of waiting only if one of the plans is a pipeline."""
    figures = _figures(_COSTS, before, after)
    return tuple(f for f in figures if f.name != "idle" or f.before or f.after)


def _figures(names: Iterable[str], before: object, after: object) -> tuple[Figure, ...]:
    return tuple(Figure(name, getattr(before, name), getattr(after, name)) for name in names)
