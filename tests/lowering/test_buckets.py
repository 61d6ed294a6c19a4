"""Reshardings of parameters that share a bucket."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from support import models
from support.meshes import slow_devices
from support.recomputation import checkpointing

from autoshard.checker import check_plan
from autoshard.graph import Graph, graph_from_json
from autoshard.layouts.steps import STEP_OVERHEAD
from autoshard.lowering import buckets as plan_buckets
from autoshard.lowering.buckets import Bucket, buckets_of
from autoshard.lowering.recompute import checkpoint_spans, recomputed
from autoshard.mesh import AlphaBeta, Axis, Mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.pricing.charges import bucket_charges

ROWS = dict.fromkeys(("*.attn", "*.mlp", "*.c_*", "*.ln_*", "lm_head"), "S(0)")
SHARDED = {"pins": {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}, "nodes": ROWS}}
WHOLE = {"pins": {"parameters": {"*": "I"}, "inputs": {"*": "S(0)"}, "nodes": ROWS}}


@cache
def planned(options: str) -> tuple[Plan, Graph]:
    given = {
        "sharded": SHARDED,
        "whole": WHOLE,
        "again": SHARDED | {"reshard_after_forward": "always"},
        "checkpointed": SHARDED
        | {"reshard_after_forward": "always", "activation_checkpointing": "always"},
    }[options]
    graph = models.graph_of(models.gpt2())
    plan = make_plan(graph, slow_devices(dp=4), PlanOptions(**given))
    assert check_plan(plan, graph) == ()
    return plan, graph_from_json(plan.stages[0].program)


def buckets(options: str) -> tuple[Bucket, ...]:
    plan, graph = planned(options)
    return buckets_of(plan.stages[0], graph)


@pytest.mark.matrix
@pytest.mark.parametrize("options", ["sharded", "whole", "again", "checkpointed"])
def test_members_take_the_same_steps(options: str) -> None:
    found = buckets(options)
    assert any(len(bucket.reshardings) > 1 for bucket in found)
    for bucket in found:
        chains = [[(s.axis, s.forward, s.backward) for s in c.steps] for c in bucket.reshardings]
        assert all(chain == chains[0] for chain in chains)
        assert {c.regather for c in bucket.reshardings} == {bucket.regather}
    uses = [use for bucket in found for use in bucket.uses]
    assert len(set(uses)) == len(uses)


def test_one_bucket_gathers_ahead() -> None:
    gathering = [b for b in buckets("again") if b.reshardings[0].steps[0].forward == "all_gather"]
    assert len(gathering) > 1
    assert gathering[0].begins == 0
    for before, after in pairwise(gathering):
        assert after.begins == before.reader <= after.reader


def test_what_only_reduces_begins_with_the_program() -> None:
    reducing = [b for b in buckets("whole") if b.reshardings[0].steps[0].forward == "nothing"]
    assert reducing
    assert not any(bucket.begins for bucket in reducing)


def test_large_parameters_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_buckets, "SMALL", 300)
    monkeypatch.setattr(plan_buckets, "LARGEST", 400)
    _, graph = planned("whole")
    sizes = [
        [graph.values[c.value].nbytes for c in bucket.reshardings] for bucket in buckets("whole")
    ]
    assert {len(row) > 1 for row in sizes} == {True, False}
    assert any(max(row) > 300 for row in sizes)
    for row in sizes:
        assert len(row) == 1 or (max(row) <= 300 and sum(row) <= 400)


def checkpointed(at_rest: str) -> tuple[Plan, Graph]:
    """Three layers, each a checkpoint; backward has no need of the last addition of any."""
    nodes = dict.fromkeys(("layer_norm*", "linear*", "relu*", "add*"), "S(0)")
    pins = {"parameters": {"*": at_rest}, "inputs": {"*": "S(0)"}, "nodes": nodes}
    graph = models.graph_of(models.meta(models.residuals))
    plan = make_plan(graph, slow_devices(dp=4), PlanOptions(pins=pins))
    edited = checkpointing(plan, *(f"layers.{number}" for number in range(3)))
    return edited, graph_from_json(plan.stages[0].program)


def test_in_a_checkpoint_are_those_of_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_buckets, "LARGEST", 128 * 32 * 4)
    plan, graph = checkpointed("S(0)")
    stage = plan.stages[0]
    spans = checkpoint_spans(graph, stage)
    assert len(spans) == 3
    by_checkpoint: dict[int, list[Bucket]] = {}
    for bucket in buckets_of(stage, graph):
        by_checkpoint.setdefault(bucket.checkpoint, []).append(bucket)
    assert by_checkpoint.keys() == {0, 1, 2}
    for number, found in by_checkpoint.items():
        norm, up, down, shift = found
        assert {use[1] for b in found for use in b.uses} <= {
            graph.nodes[i].name for i in spans[number]
        }
        assert len(norm.reshardings) == 2
        # One is gathered ahead; what backward does not reach is not.
        assert norm.begins == spans[number].start
        assert (up.begins, down.begins) == (norm.reader, up.reader)
        assert shift.begins == shift.reader > down.reader
    again = recomputed(graph, stage).reshardings
    gathers = {use for found in by_checkpoint.values() for bucket in found for use in bucket.uses}
    assert gathers - again == {use for found in by_checkpoint.values() for use in found[-1].uses}


def test_what_only_reduces_stays_out_of_checkpoints() -> None:
    plan, graph = checkpointed("I")
    stage = plan.stages[0]
    first = checkpoint_spans(graph, stage)[0].start
    (bucket,) = buckets_of(stage, graph)
    assert (bucket.checkpoint, bucket.begins, bucket.reader) == (-1, 0, first)
    assert len(bucket.reshardings) == len(stage.parameters)
    assert [c.count for c in plan.collectives if c.direction == "backward"] == [1]


def test_a_member_pays_its_part_of_a_full_bucket() -> None:
    plan, graph = planned("whole")
    mesh = plan.mesh
    for bucket in buckets("whole"):
        for resharding in bucket.reshardings:
            (step,) = resharding.steps
            parts = plan_buckets.LARGEST / graph.values[resharding.value].nbytes
            full = mesh.collective_time("all_reduce", 0, plan_buckets.LARGEST)
            assert step.time == pytest.approx(full / parts + STEP_OVERHEAD)


def test_a_parameter_too_large_to_share_pays_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = planned("whole")
    monkeypatch.setattr(plan_buckets, "SMALL", 300)
    found = bucket_charges(graph, slow_devices(dp=4))
    small = {p.name for p in graph.parameters if graph.values[p.name].nbytes <= 300}
    assert set(found) == small
    assert len(small) < len(list(graph.parameters))


def test_published_prices_are_of_one_collective_per_tensor() -> None:
    _, graph = planned("whole")
    published = Mesh((Axis("dp", 4),), slow_devices(dp=4).topology, AlphaBeta((1.0,), (1.0,)))
    assert bucket_charges(graph, published) == {}


def _reshardings(kind: str, direction: str) -> Callable[[Plan], list[int]]:
    def sizes(plan: Plan) -> list[int]:
        steps = (step for c in plan.stages[0].reshardings for step in c.steps)
        return [s.nbytes for s in steps if getattr(s, direction) == kind]

    return sizes


def test_they_are_counted_once_with_the_bytes_of_all() -> None:
    plan, _ = planned("whole")
    (found,) = [c for c in plan.collectives if (c.kind, c.direction) == ("all_reduce", "backward")]
    separate = _reshardings("all_reduce", "backward")(plan)
    inside = [
        s.nbytes
        for node in plan.stages[0].nodes
        for s in node.inside
        if (s.action, s.direction) == ("all_reduce", "backward")
    ]
    assert found.nbytes == sum(separate) + sum(inside)
    assert found.count < len(separate)
