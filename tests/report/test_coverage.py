"""Operators that are replicated, the reasons, and the cost."""

from functools import cache

import pytest
import torch
from support.meshes import slow_devices
from support.models import gpt2, graph_of, small_graph
from torch import nn

from autoshard.errors import PlanError
from autoshard.graph import Graph
from autoshard.plan import Pins, Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.report import Coverage, OperatorUse, operator_coverage


class Whole(nn.Module):
    """Linear layers around operators that cannot be sharded: one sums, one has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4096), nn.Linear(4096, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).flatten().cumsum(0).reshape(16, 4096)
        return torch.matrix_exp(hidden[:, :16]).sum() + self.down(hidden).square().mean()


@cache
def graph() -> Graph:
    return graph_of((Whole(), {"x": torch.randn(16, 8)}))


@cache
def planned() -> Plan:
    plan = make_plan(graph(), slow_devices(a=2, b=4), PlanOptions(mode="inference"))
    assert plan.found, plan.reason
    return plan


def use_of(coverage: Coverage, operator: str) -> OperatorUse:
    return next(use for use in coverage.operators if use.operator == f"aten.{operator}")


def test_operators_without_a_cut_are_named_with_their_reason() -> None:
    coverage = operator_coverage(graph())
    assert coverage.total is None
    assert coverage.share_whole is None
    scan = use_of(coverage, "cumsum.default")
    assert (scan.has_rule, scan.num_whole) == (True, 1)
    assert "works along" in scan.reasons[0]
    unknown = use_of(coverage, "matrix_exp.default")
    assert (unknown.has_rule, unknown.reasons) == (False, ("It has no rule.",))
    assert use_of(coverage, "linear.default").num_whole == 0
    assert "one element" in use_of(coverage, "add.Tensor").reasons[0]
    assert coverage.num_calls == len(graph().nodes)
    falls_back = [use.num_whole > 0 for use in coverage.operators]
    assert falls_back == sorted(falls_back, reverse=True)


def test_times_are_those_of_the_plan() -> None:
    plan = planned()
    coverage = operator_coverage(graph(), plan)
    times = {node.name: node.time + node.communication for node in plan.stages[0].nodes}
    assert coverage.total == plan.costs.total
    assert sum(use.time for use in coverage.operators) == pytest.approx(sum(times.values()))
    scans = [node.name for node in graph().nodes if node.operator == "aten.cumsum.default"]
    scan = use_of(coverage, "cumsum.default")
    assert scan.time == scan.time_whole == sum(times[name] for name in scans)
    whole = sum(use.time_whole for use in coverage.operators)
    assert coverage.share_whole == pytest.approx(whole / coverage.total)


def test_reshardings_around_count_once() -> None:
    plan = planned()
    coverage = operator_coverage(graph(), plan)
    whole = {use.operator for use in coverage.operators if use.num_whole == use.num_calls}
    names = {node.name for node in graph().nodes if node.operator in whole}
    made = {value for node in graph().nodes if node.name in names for value in node.outputs}
    around = [c for c in plan.stages[0].reshardings if c.consumer in names or c.value in made]
    seen = sum(max(c.time - c.overlapped, 0.0) for c in around)
    assert seen > 0
    found = sum(use.time_around for use in coverage.operators)
    assert found == pytest.approx(seen)
    assert coverage.share_around == pytest.approx(found / coverage.total)


def test_collectives_inside_operators_are_part_of_their_time() -> None:
    norm = graph_of((nn.LayerNorm(64), {"input": torch.randn(4, 64)}))
    pins = Pins(nodes={"layer_norm": "S(1) * * -> S(1)"})
    plan = make_plan(norm, slow_devices(a=4), PlanOptions(mode="inference", pins=pins))
    (node,) = plan.stages[0].nodes
    assert node.communication > 0
    (use,) = operator_coverage(norm, plan).operators
    assert use.time == pytest.approx(node.time + node.communication)


def test_what_is_hidden_is_not_around() -> None:
    plan = planned()
    stage = plan.stages[0]
    plain = operator_coverage(graph(), plan)
    overlapping = [c.model_copy(update={"overlapped": c.time / 4}) for c in stage.reshardings]
    overlapped = stage.model_copy(update={"reshardings": tuple(overlapping)})
    coverage = operator_coverage(graph(), plan.model_copy(update={"stages": (overlapped,)}))
    assert plain.share_around > 0
    assert coverage.share_around == pytest.approx(0.75 * plain.share_around)


def test_a_size_that_no_axis_divides_falls_back_on_that_mesh_only() -> None:
    odd = graph_of((nn.Linear(3, 5), {"input": torch.randn(6, 3)}))
    assert operator_coverage(odd).num_whole == 0
    plan = make_plan(odd, slow_devices(a=4, b=8), PlanOptions(mode="inference"))
    (use,) = operator_coverage(odd, plan).operators
    assert use.reasons == ("No size that may be sharded divides into 4 or 8 slices.",)


def test_an_axis_of_one_rank_does_not_count() -> None:
    plan = make_plan(graph(), slow_devices(a=1), PlanOptions(mode="inference"))
    coverage = operator_coverage(graph(), plan)
    assert coverage.num_whole == operator_coverage(graph()).num_whole
    assert coverage.share_around == 0.0


def test_a_plan_of_another_graph_is_refused() -> None:
    with pytest.raises(PlanError, match="another graph"):
        operator_coverage(small_graph(gpt2), planned())


def test_a_document_without_a_plan_is_refused() -> None:
    options = PlanOptions(mode="inference", memory_budget=1)
    with pytest.raises(PlanError, match="has no plan to take"):
        operator_coverage(graph(), make_plan(graph(), slow_devices(a=2), options))
