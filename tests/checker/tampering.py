"""Changes of plan documents, and what the checker finds in a changed plan."""

import json
import re
from collections.abc import Callable
from typing import Any

from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.plan import Plan

Tamper = Callable[[dict[str, Any]], object]


def edit(*path: Any, to: Any) -> Tamper:
    """Sets what is at a path, or applies a function to it."""

    def tamper(document: dict[str, Any]) -> None:
        *rest, last = path
        for key in rest:
            document = document[key]
        document[last] = to(document[last]) if callable(to) else to

    return tamper


def check_is_found(plan: Plan, tamper: Tamper, finding: str, graph: Graph | None = None) -> None:
    """The checker finds what a change does to a plan."""
    document = json.loads(plan.to_json())
    tamper(document)
    findings = check_plan(Plan.from_json(json.dumps(document)), graph)
    assert any(re.search(finding, found) for found in findings), findings
