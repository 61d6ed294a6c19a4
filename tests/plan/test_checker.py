"""A plan that was tampered with is found out, whatever was changed."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.models import graph_of, meta, mlp

from autoshard.plan import Plan, check_plan

Tamper = Callable[[dict[str, Any]], None]


def _set(*path: Any, to: Any) -> Tamper:
    def tamper(document: dict[str, Any]) -> None:
        *rest, last = path
        for key in rest:
            document = document[key]
        document[last] = to(document[last]) if callable(to) else to

    return tamper


STAGE = ("stages", 0)
CASES: dict[str, tuple[Tamper, str]] = {
    "a node that takes less time": (
        _set(*STAGE, "nodes", 0, "time", to=lambda t: t / 2),
        "takes",
    ),
    "a node whose output has another layout": (
        _set(*STAGE, "nodes", 1, "outputs", 0, to="S(0),S(0)"),
        "illegal|no rule",
    ),
    "a node that keeps a partial sum as whole": (
        _set(*STAGE, "nodes", 2, "outputs", 0, to="R,R"),
        "no rule",
    ),
    "an input that wants another layout": (
        _set(*STAGE, "nodes", 1, "inputs", 0, to="R,R"),
        "wants|no rule",
    ),
    "a parameter resting with a partial gradient": (
        _set(*STAGE, "inputs", 3, "layout", to="R,R"),
        "its gradient is incomplete",
    ),
    "a parameter with another local shape": (
        _set(*STAGE, "inputs", 0, "local_shape", to=(1, 1)),
        "local shape",
    ),
    "placements that do not follow": (
        _set(*STAGE, "inputs", 0, "placements", to=("Replicate()", "Replicate()")),
        "placements",
    ),
    "a conversion left out": (_set(*STAGE, "conversions", to=lambda c: c[:-1]), "arrives as"),
    "a conversion too many": (
        _set(*STAGE, "conversions", to=lambda c: [*c, {**c[-1], "position": 7}]),
        "serves no use",
    ),
    "a step that skips its collective": (
        _set(*STAGE, "conversions", -1, "steps", -1, "forward", to="nothing"),
        "not as stated",
    ),
    "a step that moves fewer bytes": (
        _set(*STAGE, "conversions", -1, "steps", -1, "nbytes", to=8),
        "moves",
    ),
    "a step that is faster": (
        _set(*STAGE, "conversions", -1, "steps", -1, "time", to=0.0),
        "a step takes",
    ),
    "a step on an axis that does not exist": (
        _set(*STAGE, "conversions", -1, "steps", -1, "axis", to="pp"),
        "pp|not in",
    ),
    "a total that is too low": (_set("costs", "total", to=lambda t: t / 2), "total cost"),
    "a compute time that is too low": (_set("costs", "compute", to=0.0), "compute adds up"),
    "a bound above the objective": (_set("certificate", "bound", to=1.0), "bound"),
    "a gap that flatters": (
        lambda d: d["certificate"].update(bound=d["certificate"]["objective"] / 2),
        "gap",
    ),
    "a budget that the peak breaks": (_set("memory", "budget", to=1), "over the budget"),
    "a smaller peak": (_set("memory", "peak", to=1), "memory|peak"),
    "fewer collectives": (_set("collectives", to=[]), "table of collectives"),
    "another program": (
        _set(*STAGE, "program", "nodes", 0, "operator", to="aten.mul.Tensor"),
        "program",
    ),
    "other axes": (_set(*STAGE, "axes", to=[["dp", 4], ["tp", 1]]), "axes"),
}


@pytest.mark.parametrize("name", CASES)
def test_tampering_is_found_out(megatron: Plan, name: str) -> None:
    tamper, finding = CASES[name]
    document = json.loads(megatron.to_json())
    tamper(document)
    findings = check_plan(Plan.from_json(json.dumps(document)))
    assert any(re.search(finding, f) for f in findings), findings


def test_an_untouched_plan_is_right(megatron: Plan) -> None:
    assert check_plan(Plan.from_json(megatron.to_json())) == ()


def test_a_plan_of_another_graph_is_found_out(megatron: Plan) -> None:
    findings = check_plan(megatron, graph_of(meta(mlp, 2, 8192, 32768, 8192)))
    assert findings == ("the plan was made for another graph",)
