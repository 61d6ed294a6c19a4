"""The setting of Alpa's own tests: its prices, and how it counts collectives.

Source: alpa-projects/alpa, alpa/shard_parallel/auto_sharding.py (prices) and
tests/shard_parallel (models, counts and objectives).
"""

from collections import Counter
from typing import Any

from autoshard.base.outcome import SolveStatus
from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.mesh import COLLECTIVES, AlphaBeta, Axis, Device, Link, Mesh, Topology
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

FREE = Device("free", {"float32": 1e30}, memory_bandwidth=1e30, memory=1 << 50)
"""Computes in no time, so that a plan's price is its communication."""

SCALAR_NBYTES = 8
"""Alpa ignores all-reduces of scalars (the loss, and the count of its terms); so do we."""

ONLY_ALL_REDUCES = tuple({"kind": kind} for kind in COLLECTIVES if kind != "all_reduce")
"""Value of the option `forbid`."""


def alpa_mesh(*sizes: int) -> Mesh:
    """Axes `a0`, `a1`, ... that cost one unit per collective and one per byte."""
    axes = tuple(Axis(f"a{i}", size) for i, size in enumerate(sizes))
    ones = (1.0,) * len(sizes)
    links = (Link("unused", None, bandwidth=1e30, latency=0.0),)
    return Mesh(axes, Topology("alpa", FREE, links, backend="gloo"), AlphaBeta(ones, ones))


def all_reduce(nbytes: int, num_ranks: int = 4) -> float:
    """Alpa's price of an all-reduce with alpha = beta = 1."""
    return 1 + 2 * (num_ranks - 1) / num_ranks * nbytes + 0.01


def all_gather(nbytes: int, num_ranks: int = 4) -> float:
    """Alpa's price of an all-gather that makes so many bytes, likewise."""
    return 1 + (num_ranks - 1) / num_ranks * nbytes + 0.1


LOSS = all_reduce(4)
"""Price of the one all-reduce of a float32 loss over 4 ranks, which Alpa does not count."""


def optimal(graph: Graph, mesh: Mesh, **options: Any) -> Plan:
    """A plan that is proven optimal and in which the checker finds nothing wrong.

    Compute is free, so doing everything everywhere would be, too: unless a test says
    otherwise every operator must be cut. (Alpa forbids idle ranks to products only.)
    """
    defaults = {"optimizer": "adam", "skip_fully_replicated": True}
    plan = make_plan(graph, mesh, PlanOptions(**defaults | options))
    assert plan.certificate.status is SolveStatus.OPTIMAL
    assert check_plan(plan, graph) == ()
    return plan


def price(plan: Plan) -> float:
    """What the plan's communication costs."""
    assert plan.costs is not None
    return plan.costs.communication


def counts(plan: Plan) -> Counter[str]:
    """Collectives by kind as Alpa counts them: after XLA has combined them.

    All parameters that take the same collective over the same axis in the same direction
    are one bucket and count once; the plan itself has one collective per parameter. Those
    of activations stand between or inside operators, cannot be combined, and count one by one.
    """
    (stage,) = plan.stages
    parameters = {parameter.name for parameter in stage.parameters}
    buckets, found = set(), Counter[str]()
    for resharding in stage.reshardings:
        for step in resharding.steps:
            runs = [(step.forward, "forward"), (step.backward, "backward")]
            runs += [(step.forward, "backward")] * resharding.regather
            for kind, direction in runs:
                if kind not in COLLECTIVES or step.nbytes <= SCALAR_NBYTES:
                    continue
                if resharding.value in parameters:
                    buckets.add((kind, step.axis, direction))
                else:
                    found[kind] += 1
    inside = (step for node in stage.nodes for step in node.inside)
    found.update(step.action for step in inside if step.nbytes > SCALAR_NBYTES)
    found.update(kind for kind, _, _ in buckets)
    return found


def parameters(plan: Plan) -> dict[str, str]:
    """Layouts of the parameters at rest, by name."""
    return {p.target: p.layout for p in plan.stages[0].parameters}


def user_inputs(plan: Plan) -> dict[str, str]:
    """Layouts of what the caller passes, by name."""
    return {i.target: i.layout for i in plan.stages[0].inputs if i.kind == "user"}


def operators(plan: Plan, graph: Graph, name: str) -> list[tuple[tuple[str, ...], str]]:
    """Layouts of the inputs and of the first output of each operator of that name."""
    nodes = zip(graph.nodes, plan.stages[0].nodes, strict=True)
    return [
        (placed.inputs, placed.outputs[0])
        for node, placed in nodes
        if node.operator.split(".")[1] == name
    ]
