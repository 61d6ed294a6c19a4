"""The checker detects every modification of a plan."""

import json
import re
from typing import Any

import pytest
import torch
from checker.tampering import Tamper, check_is_found, edit
from scenarios.architectures import mlp as chain
from support.meshes import slow_devices
from support.models import Planner, graph_of, meta, mlp
from torch import nn

from autoshard.checker import check_plan
from autoshard.costs import GATHERED_ONCE
from autoshard.errors import OptionError
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

STAGE = ("stages", 0)
CASES: dict[str, tuple[Tamper, str]] = {
    "a node that takes less time": (
        edit(*STAGE, "nodes", 0, "time", to=lambda t: t / 2),
        "takes",
    ),
    "a node whose output has another layout": (
        edit(*STAGE, "nodes", 1, "outputs", 0, to="S(0),S(0)"),
        "illegal|no rule",
    ),
    "a node that keeps a partial sum as whole": (
        edit(*STAGE, "nodes", 2, "outputs", 0, to="R,R"),
        "no rule",
    ),
    "an input that wants another layout": (
        edit(*STAGE, "nodes", 1, "inputs", 0, to="R,R"),
        "wants|no rule",
    ),
    "a parameter resting with a partial gradient": (
        edit(*STAGE, "inputs", 3, "layout", to="R,R"),
        "its gradient is incomplete",
    ),
    "a parameter with another local shape": (
        edit(*STAGE, "inputs", 0, "local_shape", to=(1, 1)),
        "local shape",
    ),
    "placements that do not follow": (
        edit(*STAGE, "inputs", 0, "placements", to=("Replicate()", "Replicate()")),
        "placements",
    ),
    "a resharding left out": (edit(*STAGE, "reshardings", to=lambda c: c[:-1]), "arrives as"),
    "a resharding too many": (
        edit(*STAGE, "reshardings", to=lambda c: [*c, {**c[-1], "position": 7}]),
        "serves no use",
    ),
    "a step that skips its collective": (
        edit(*STAGE, "reshardings", -1, "steps", -1, "forward", to="nothing"),
        "not as stated",
    ),
    "a step that moves fewer bytes": (
        edit(*STAGE, "reshardings", -1, "steps", -1, "nbytes", to=8),
        "moves",
    ),
    "a step that is faster": (
        edit(*STAGE, "reshardings", -1, "steps", -1, "time", to=0.0),
        "a step takes",
    ),
    "a step that runs what nobody knows": (
        edit(*STAGE, "reshardings", -1, "steps", -1, "forward", to="teleport"),
        "teleport",
    ),
    "a step on an axis that does not exist": (
        edit(*STAGE, "reshardings", -1, "steps", -1, "axis", to="pp"),
        "pp|not in",
    ),
    "a total that is too low": (edit("costs", "total", to=lambda t: t / 2), "total cost"),
    "a compute time that is too low": (edit("costs", "compute", to=0.0), "compute adds up"),
    "a bound above the objective": (edit("certificate", "bound", to=1.0), "bound"),
    "a gap that flatters": (
        lambda d: d["certificate"].update(bound=d["certificate"]["objective"] / 2),
        "gap",
    ),
    "a budget that the peak breaks": (edit("memory", "budget", to=1), "over the budget"),
    "a smaller peak": (edit("memory", "peak", to=1), "memory|peak"),
    "a peak that lies elsewhere": (edit("memory", "phase", to="optimizer"), "the peak is in"),
    "fewer bytes at the turn": (edit("memory", "turn", to=1), "at the turn"),
    "micro-batches that keep less": (edit("memory", "per_micro_batch", to=1), "per micro-batch"),
    "a smaller step of the optimizer": (
        edit("memory", "optimizer_step", to=1),
        "at the optimizer's step",
    ),
    "temporaries that flatter": (edit("memory", "temporaries", to=0), "temporaries take"),
    "a resharding that runs again for nothing": (
        edit(*STAGE, "reshardings", -1, "regather", to=True),
        "backward does not need it",
    ),
    "fewer collectives": (edit("collectives", to=[]), "table of collectives"),
    "another program": (
        edit(*STAGE, "program", "nodes", 0, "operator", to="aten.mul.Tensor"),
        "program",
    ),
    "other axes": (edit(*STAGE, "axes", to=[["dp", 4], ["tp", 1]]), "axes"),
}


@pytest.mark.parametrize("name", CASES)
def test_tampering_is_found_out(megatron: Plan, name: str) -> None:
    check_is_found(megatron, *CASES[name])


def test_an_untouched_plan_is_right(megatron: Plan) -> None:
    assert check_plan(Plan.from_json(megatron.to_json())) == ()


def test_a_plan_of_another_graph_is_found_out(megatron: Plan) -> None:
    findings = check_plan(megatron, graph_of(meta(mlp, 2, 8192, 32768, 8192)))
    assert findings == ("the plan was made for another graph",)


class Cache(nn.Module):
    """A buffer that forward writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.copy_(x)
        return x * 2


@pytest.mark.parametrize(
    ("updates", "layout", "finding"),
    [
        (None, "S(0)", "updates b_rows, not None"),
        ("b_rows", "S(1)", r"leaves as S\(1\), and the buffer b_rows .* is stored as S\(0\)"),
    ],
)
def test_a_buffer_that_would_change_its_layout_is_found_out(
    planned: Planner, updates: str | None, layout: str, finding: str
) -> None:
    graph = graph_of((Cache(), {"x": torch.zeros(8, 4)}))
    plan = planned(graph, (4,), mode="inference", pins={"inputs": {"x": "S(0)"}})
    document = json.loads(plan.to_json())
    (output,) = (o for o in document["stages"][0]["outputs"] if o["updates"] is not None)
    assert output["layout"] == "S(0)"
    output.update(updates=updates, layout=layout)
    findings = check_plan(Plan.from_json(json.dumps(document)))
    assert any(re.search(finding, f) for f in findings), findings


@pytest.fixture(scope="module")
def recomputing(planned: Planner) -> Plan:
    """A plan that reshards again and checkpoints, since memory is short."""
    options = {"pins": {"parameters": {"*": "S(0)"}}, "reshard_after_forward": "always"}
    graph, mesh = chain(layers=6, batch=256, width=32), slow_devices(a=4)
    ample = planned(graph, mesh, **options)
    plan = planned(graph, mesh, **options, memory_budget=int(0.95 * ample.memory.peak))
    (stage,) = plan.stages
    assert stage.checkpoints
    assert any(resharding.regather for resharding in stage.reshardings)
    return plan


def _hold_all(document: dict[str, Any]) -> None:
    for resharding in document["stages"][0]["reshardings"]:
        resharding["regather"] = False


def test_blocks_that_are_not_checkpointed_as_asked_are_found_out(planned: Planner) -> None:
    plan = planned(chain(layers=6, batch=256, width=32), (2,), activation_checkpointing="always")
    document = json.loads(plan.to_json())
    left_out = document["stages"][0]["checkpoints"].pop(1)
    findings = check_plan(Plan.from_json(json.dumps(document)))
    wrong = f"the block from {left_out['first']!r} to {left_out['last']!r} is not checkpointed"
    assert [f for f in findings if "checkpointed" in f] == [f"{wrong} as asked for"]


RECOMPUTING: dict[str, tuple[Tamper, str]] = {
    "what runs again is held": (_hold_all, "recompute adds up|over the budget"),
    "checkpoints left out": (edit(*STAGE, "checkpoints", to=[]), "recompute adds up"),
    "a checkpoint that ends too early": (
        lambda d: d["stages"][0]["checkpoints"][0].update(
            last=d["stages"][0]["checkpoints"][0]["first"]
        ),
        "recompute adds up",
    ),
    "a checkpoint between no nodes": (
        edit(*STAGE, "checkpoints", 0, "first", to="nobody"),
        "is not between nodes",
    ),
    "recomputing that is cheaper": (edit("costs", "recompute", to=0.0), "recompute adds up"),
    "collectives that run once only": (
        lambda d: d["collectives"].pop(
            next(i for i, c in enumerate(d["collectives"]) if c["direction"] == "backward")
        ),
        "table of collectives",
    ),
    "options that rule checkpoints out": (
        edit("options", "memory", "activation_checkpointing", to="never"),
        "checkpoints, which the options rule out",
    ),
    "options that rule reshardings out": (
        edit("options", "memory", "reshard_after_forward", to="never"),
        "re-gathers in backward, which the options rule out",
    ),
    "a larger budget than was asked for": (
        edit("memory", "budget", to=lambda b: b + 1),
        "the budget is",
    ),
}


@pytest.mark.parametrize("name", RECOMPUTING)
def test_tampering_with_what_is_recomputed_is_found_out(recomputing: Plan, name: str) -> None:
    check_is_found(recomputing, *RECOMPUTING[name])


@pytest.fixture(scope="module")
def accumulating(planned: Planner) -> Plan:
    pins = {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}}
    options = {"micro_batches": 3, "in_flight": 2, "pins": pins}
    return planned(graph_of(mlp(batch=1024)), slow_devices(a=4), **options)


ACCUMULATING: dict[str, tuple[Tamper, str]] = {
    "another number of micro-batches": (
        edit(*STAGE, "micro_batches", to=1),
        "micro-batches, not",
    ),
    "fewer micro-batches in flight": (
        edit(*STAGE, "in_flight", to=1),
        "1 micro-batches are in flight, not 2",
    ),
    "sums of another type": (
        edit(*STAGE, "accumulation_dtype", to="bfloat16"),
        "sums gradients in bfloat16",
    ),
    "a gather that runs more often": (
        edit(*STAGE, "reshardings", 0, "frequency", to="micro_batch"),
        "a step takes",
    ),
    "fewer runs": (edit("options", "training", "micro_batches", to=2), "micro-batches, not 2"),
    "options that rule kept parameters out": (
        edit("options", "memory", "reshard_after_forward", to="always"),
        "stay gathered, which the options rule out",
    ),
    "a resharding that would be gathered twice": (
        edit(*STAGE, "reshardings", 0, "regather", to=True),
        "which is for gathers of parameters",
    ),
}


@pytest.mark.parametrize("name", ACCUMULATING)
def test_tampering_with_what_runs_once_is_found_out(accumulating: Plan, name: str) -> None:
    assert accumulating.stages[0].reshardings[0].frequency in GATHERED_ONCE
    check_is_found(accumulating, *ACCUMULATING[name])


def test_micro_batches_are_for_training() -> None:
    with pytest.raises(OptionError, match="micro_batches is for training"):
        make_plan(
            graph_of(mlp()), slow_devices(a=4), PlanOptions(mode="inference", micro_batches=2)
        )


def test_no_more_micro_batches_are_in_flight_than_there_are() -> None:
    with pytest.raises(OptionError, match="in_flight is 3, but a step has 2 micro-batches"):
        make_plan(graph_of(mlp()), slow_devices(a=4), PlanOptions(micro_batches=2, in_flight=3))
