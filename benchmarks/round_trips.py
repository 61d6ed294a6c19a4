"""Plans exported and read back: `python -m benchmarks.round_trips`, into docs/exports.md.

Small language models of the zoo are planned for each target that has a meaning of its own. The
exported text is read back, or applied again as constraints where it is code, and planned: shards
of parameters, step time, memory and collectives are compared with those of the plan.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

from autoshard.errors import InputError
from autoshard.exports import expressed_share
from autoshard.exports.expressed import percent
from autoshard.exports.results import same_collectives
from autoshard.graph import Graph, export_model, load_graph
from autoshard.mesh import Device, Mesh, make_mesh
from autoshard.plan import Plan
from autoshard.planner import make_plan
from autoshard.requests.export_results import export_result
from benchmarks.tables import rows
from benchmarks.zoo.decoders import DECODERS, EXPERTS

LANGUAGE = {**DECODERS, **EXPERTS}
"""Language models of the zoo."""
PAGE = Path(__file__).parent.parent / "docs" / "exports.md"
MEGATRON = {"algo": "megatron-sp", "distributed_optimizer": True, "regather_activations": True}
TARGETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fsdp2": ("replicate=2,shard=2", {"exportable_to": "fsdp2"}),
    "parallelize-module": ("dp=2,tp=2", {"exportable_to": "parallelize-module"}),
    "hf-tp-plan": ("tp=2", {"exportable_to": "hf-tp-plan"}),
    "torchtitan": ("a=2,b=2", {"exportable_to": "torchtitan"}),
    "accelerate": ("dp=4", {"algo": "fsdp2", "reshard_after_forward": "always"}),
    "megatron": ("dp=2,tp=2", MEGATRON),
}
"""Mesh and options of the plans for each target."""


@dataclass(frozen=True)
class RoundTrip:
    """A plan, and what its export means.

    Attributes:
        share: of the plan that the target expresses; None if there is no plan for the target.
        collectives: share of the collectives that are the same.
        same: True if shards of parameters, step time and memory are the same; axes may be merged.
        reason: why there is no plan, or no price of the result.
    """

    share: float | None = None
    collectives: float = 0.0
    same: bool = False
    reason: str = ""

    def __str__(self) -> str:
        if self.share is None:
            return "-"
        shown = percent(self.share)
        if self.reason:
            return f"{shown}, not read back"
        return shown if self.same else f"{shown}, {percent(self.collectives)} of collectives"


def round_trip(graph: Graph, target: str) -> RoundTrip:
    """Plan a program for a target, export it, and read it back."""
    mesh, options = TARGETS[target]
    try:
        plan = make_plan(graph, slow_mesh(mesh), **options)
        if not plan.found:
            return RoundTrip(reason=plan.reason)
        share = expressed_share(plan, target)
    except InputError as error:
        return RoundTrip(reason=str(error))
    assert share is not None, "tables have no result"
    try:
        result = export_result(plan, target)
    except InputError as error:
        return RoundTrip(share.share, reason=str(error))
    if not result.found:
        return RoundTrip(share.share, reason=result.reason)
    return RoundTrip(share.share, same_collectives(plan, result), _is_same(plan, result))


def _is_same(plan: Plan, result: Plan) -> bool:
    assert plan.costs is not None
    assert result.costs is not None
    shards = [{p.target: p.local_shape for p in one.stages[0].parameters} for one in (plan, result)]
    is_as_fast = isclose(plan.costs.total, result.costs.total, rel_tol=1e-9)
    return shards[0] == shards[1] and is_as_fast and plan.memory == result.memory


def slow_mesh(shape: str) -> Mesh:
    """Devices so slow that even small models are worth sharding."""
    mesh = make_mesh(shape)
    device = Device("slow", {"float32": 1e7}, memory_bandwidth=1e8, memory=1 << 34)
    return replace(mesh, topology=replace(mesh.topology, device=device, collective_overhead=0.0))


def small_graph(name: str) -> Graph:
    """The program of a small language model of the zoo."""
    model, inputs = LANGUAGE[name].build_small()
    return load_graph(export_model(model, (), inputs))


def main(names: list[str]) -> Iterator[tuple[str, list[RoundTrip]]]:
    """A row per model: its name, and the round trip to each target."""
    for name in names or LANGUAGE:
        graph = small_graph(name)
        yield name, [round_trip(graph, target) for target in TARGETS]


if __name__ == "__main__":
    found = dict(main(sys.argv[1:]))
    table = rows(("model", *TARGETS), [[name, *map(str, trips)] for name, trips in found.items()])
    begin, end = "<!-- round trips -->", "<!-- /round trips -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}", encoding="utf-8")
    for name, trips in found.items():
        for target, trip in zip(TARGETS, trips, strict=True):
            if trip.reason:
                sys.stdout.write(f"{name}, {target}: {trip.reason}\n")
