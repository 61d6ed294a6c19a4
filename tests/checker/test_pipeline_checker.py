"""The checker recomputes pipelines, and detects every modification of one."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from checker.tampering import Tamper, check_is_found, edit
from support.models import Planner, gpt2, graph_of, meta
from torch import nn

from autoshard.checker import check_plan
from autoshard.checker.programs import exchange_findings, program_findings
from autoshard.graph import Graph, StageCutter
from autoshard.plan import Plan


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(gpt2, layers=2))


@pytest.fixture(scope="module")
def pipeline(planned: Planner, graph: Graph) -> Plan:
    """Four stages on two pipeline ranks, with tied embeddings at both ends."""
    options = {"stages": 4, "stages_per_rank": 2, "schedule": "Interleaved1F1B"}
    return planned(graph, (2, 2), micro_batches=4, **options)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4,), {"stages": 3, "schedule": "1F1B", "sub_meshes": "any"}),
        ((2, 2), {"stages": 4, "schedule": "ZBVZeroBubble"}),
        ((2, 2), {"stages": 2, "overlap": True, "pins": {"nodes": {"transformer.h.1": "S(0)"}}}),
        ((2, 2), {"stages": 2, "mode": "inference", "micro_batches": 1}),
    ],
)
def test_pipelines_are_right(
    planned: Planner, graph: Graph, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    plan = planned(graph, shape, **({"micro_batches": 4} | options))
    assert plan.pipeline is not None
    assert check_plan(plan) == ()


def _more_collectives(counts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    more = {"kind": "all_to_all", "axis": "tp", "direction": "forward", "count": 1, "nbytes": 8}
    return [*counts, more]


PIPELINE, LAST = ("pipeline",), ("stages", 3)
TRANSFER = (*PIPELINE, "transfers", 1, 0)
SUMMARY = (*PIPELINE, "stages", 1)
CASES: dict[str, tuple[Tamper, str]] = {
    "a rank that holds other stages": (
        edit(*PIPELINE, "ranks", to=[[0, 1], [2, 3]]),
        "ranks hold the stages",
    ),
    "fewer micro-batches": (edit(*PIPELINE, "micro_batches", to=2), "2 micro-batches run, not 4"),
    "a schedule that was not asked for": (
        edit(*PIPELINE, "schedule", to="LoopedBFS"),
        "option schedule asks for Interleaved1F1B",
    ),
    "another number of stages per rank than asked for": (
        edit("options", "pipeline", "stages_per_rank", to=3),
        "option stages_per_rank asks for 3, but the pipeline has 2",
    ),
    "a schedule that cannot run so": (
        edit(*PIPELINE, "schedule", to="1F1B"),
        "1F1B has exactly 1 stages per pipeline rank",
    ),
    "stages on the devices of another rank": (
        lambda d: [s.update(first_device=0) for s in d["stages"]],
        "has devices of another one",
    ),
    "stages of a rank on different devices": (
        edit("stages", 2, "first_device", to=2),
        "stages of pipeline rank 0 have different devices",
    ),
    "a stage between the parts of the mesh": (
        edit(*LAST, "first_device", to=1),
        "device 1 begins no part of the mesh",
    ),
    "a stage on other axes": (edit(*LAST, "axes", to=[["dp", 2]]), "are not a part of the mesh"),
    "arguments in another order": (
        edit(*PIPELINE, "arguments", to=lambda a: a[::-1]),
        "arguments of the pipeline",
    ),
    "more memory in flight than stated": (edit("stages", 0, "in_flight", to=1), "in flight, not"),
    "a stage that is faster": (
        edit(*SUMMARY, "costs", "compute", to=0.0),
        "stage 1: compute adds up",
    ),
    "a stage that needs less memory": (edit(*SUMMARY, "memory", "peak", to=1), "stage 1: memory"),
    "a stage with a certificate of another": (
        edit(*SUMMARY, "certificate", "objective", to=1.0),
        "stage 1: objective 1.0 is not",
    ),
    "a stage with other collectives": (
        edit(*PIPELINE, "stages", 0, "collectives", to=_more_collectives),
        "stage 0: its table of collectives",
    ),
    "a transfer left out": (edit(*PIPELINE, "transfers", 1, to=[]), "cut 1: transfers are of"),
    "cuts without transfers": (
        edit(*PIPELINE, "transfers", to=lambda t: t[:2]),
        "2 cuts with transfers between 4 stages",
    ),
    "a transfer of fewer bytes": (edit(*TRANSFER, "nbytes", to=1), "nbytes is"),
    "a transfer in fewer messages": (edit(*TRANSFER, "messages", to=1), "messages is"),
    "a gradient that is not sent back": (
        edit(*TRANSFER, "has_gradient", to=False),
        "has_gradient is True",
    ),
    "a transfer into another layout": (edit(*TRANSFER, "target", to="S(2)"), "target is"),
    "tied parameters that nobody sums": (
        edit(*PIPELINE, "tied", to=[]),
        r"is held by stages \(0, 3\), not \(\)",
    ),
    "tied parameters that cost nothing": (edit(*PIPELINE, "tied", 0, "time", to=0.0), "its sum"),
    "a slower forward": (
        edit(*SUMMARY, "times", "forward", to=1.0),
        "stage 1: forward takes .* s, not 1.0",
    ),
    "a transfer that takes no time": (
        edit(*SUMMARY, "times", "send", to=0.0),
        "stage 1: send takes",
    ),
    "gradients that are sent in no time": (
        edit(*SUMMARY, "times", "send_gradient", to=0.0),
        "stage 1: send_gradient takes",
    ),
    "a step that ends without its end": (
        edit(*PIPELINE, "stages", 0, "times", "end", to=0.0),
        "stage 0: end takes",
    ),
    "a shorter step": (
        lambda d: d["costs"].update(
            total=d["costs"]["total"] - d["costs"]["idle"] / 2, idle=d["costs"]["idle"] / 2
        ),
        "a step takes .* under Interleaved1F1B",
    ),
    "a smaller bubble": (edit(*PIPELINE, "bubble", to=0.0), "ranks are idle for"),
    "costs of a rank with less work": (
        edit("costs", "compute", to=lambda c: c / 2),
        "pipeline rank with the most work",
    ),
    "less waiting": (edit("costs", "idle", to=0.0), "waits"),
    "less memory": (edit("memory", "peak", to=1), "memory: peak is"),
    "a budget that the peak breaks": (
        edit("options", "memory", "budget", to=1),
        "is over the budget 1",
    ),
    "other collectives": (
        edit("collectives", to=_more_collectives),
        "table of collectives does not add up",
    ),
    "a stage with another program": (
        edit("stages", 0, "program", "nodes", 0, "module", to="elsewhere"),
        "stage 0: node .* is not one of the program",
    ),
    "a value that the next stage does not know": (
        edit(*LAST, "inputs", to=lambda inputs: [i for i in inputs if i["kind"] != "received"]),
        "transfers are of .*, not of what is sent",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_tampering_is_found_out(pipeline: Plan, graph: Graph, name: str) -> None:
    check_is_found(pipeline, *CASES[name], graph)


def test_unequal_stages_need_permission(planned: Planner, graph: Graph) -> None:
    options = {"stages": 3, "schedule": "1F1B", "micro_batches": 4, "sub_meshes": "any"}
    plan = planned(graph, (4,), **options)
    asked = plan.options.with_values(sub_meshes="equal")
    findings = check_plan(plan.model_copy(update={"options": asked}), graph)
    assert "stages have [1, 2] devices, but the options ask for equal sub-meshes" in findings


def test_a_program_that_was_cut_otherwise_is_found_out(pipeline: Plan, graph: Graph) -> None:
    """Parts that fit each other, of a program that has one operator more or less."""
    *_, node = graph.nodes
    other = replace(graph, nodes=(*graph.nodes[:-1], replace(node, module="elsewhere")))
    found = check_plan(pipeline, other)
    assert found == ("the plan was made for another graph",)
    document = json.loads(pipeline.to_json())
    document["graph"]["num_nodes"] += 1
    (finding,) = check_plan(Plan.from_json(json.dumps(document)))
    assert finding == f"the stages do not have {len(graph.nodes) + 1} nodes together"


class Counter(nn.Module):
    """A layer that counts how often it runs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.register_buffer("runs", torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x))
        self.runs.copy_(y.detach().sum(0))
        return y


@pytest.fixture(scope="module")
def counting() -> Graph:
    model = nn.Sequential(*(Counter(16) for _ in range(4)))
    return graph_of((model, {"input": torch.randn(8, 16)}))


def _parts(graph: Graph, cut: int) -> list[Graph]:
    cutter = StageCutter(graph)
    return list(cutter.split([cutter.cut_points[cut].node]))


def test_programs_that_overlap_or_have_gaps_are_found_out(counting: Graph) -> None:
    (first, second), (longer, shorter) = _parts(counting, 1), _parts(counting, 3)
    assert not [*program_findings([first, second], counting)]
    overlap = [*program_findings([longer, second], counting)]
    assert any(
        re.search(r"node .* is in stages \[0, 1\], but it must run once", f) for f in overlap
    )
    gap = [*program_findings([first, shorter], counting)]
    assert any(re.search("node .* is in no stage", finding) for finding in gap)
    assert any(re.search("parameter .* is in no stage", finding) for finding in gap)
    for programs in ([longer, second], [first, shorter]):
        assert any(re.search("stage 1 receives", f) for f in exchange_findings(programs))


def test_stages_in_another_order_are_found_out(counting: Graph) -> None:
    first, second = _parts(counting, 1)
    found = [*program_findings([second, first], counting)]
    assert "the results of the last stage are not those of the program" in found
    assert "stage 0 has results of forward, which leave from the last stage" in found
    assert "the last stage returns another structure than the program" in found
    exchanged = [*exchange_findings([second, first])]
    assert any(re.search("but no stage is before it", finding) for finding in exchanged)
    assert any(re.search("but no stage is after it", finding) for finding in exchanged)


def test_programs_of_another_model_are_found_out(counting: Graph) -> None:
    first, second = _parts(counting, 1)
    name = first.nodes[-1].outputs[0]
    tensor = replace(first.values[name], shape=(3, 3))
    weight, *others = first.inputs
    for changed, finding in (
        (replace(first, values={**first.values, name: tensor}), f"value {name} is"),
        (replace(first, inputs=(replace(weight, target="w"), *others)), "input .* is not one of"),
        (replace(first, nodes=first.nodes[::-1]), "not in the order of the program"),
        (replace(first, model=None), "its rules or its model are not those"),
    ):
        found = [*program_findings([changed, second], counting)]
        assert any(re.match(f"stage 0: .*{finding}", f) for f in found), found


def test_a_buffer_that_no_stage_updates_is_found_out(counting: Graph) -> None:
    first, second = _parts(counting, 3)
    forgetful = replace(first, outputs=tuple(o for o in first.outputs if o.updates is None))
    assert first.updated
    found = [*program_findings([forgetful, second], counting)]
    assert any(re.search("all of that must be in one stage", finding) for finding in found)
