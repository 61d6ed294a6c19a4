"""Plans made beside busy processes: plan and bound are those of an idle machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scenarios.architectures import mlp as chain
from support.meshes import slow_devices

from autoshard.base.outcome import TIME_LIMIT_REACHED
from autoshard.graph import Graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

BUSY_PER_CORE = 3
"""Number of processes per core that compute while a plan is made."""
MESH = slow_devices(a=2, b=2)
CASES: dict[str, dict[str, Any]] = {
    "one stage": {},
    "pipeline": {"micro_batches": 4, "stages": 2},
    "several micro-batches": {"micro_batches": 4},
    "inference": {"mode": "inference"},
}


@contextmanager
def busy_processes() -> Iterator[None]:
    """Processes that compute all the time, several for each core."""
    code = "print(flush=True)\nwhile True: pass"
    number = BUSY_PER_CORE * (os.cpu_count() or 1)
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)  # noqa: S603  ours
        for _ in range(number)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
        yield
        assert all(child.poll() is None for child in children)
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return chain(layers=6, batch=256, width=32)


@pytest.fixture(scope="module")
def alone(graph: Graph) -> dict[str, Plan]:
    """The plans of all cases, made without busy processes."""
    return {name: make_plan(graph, MESH, PlanOptions(**given)) for name, given in CASES.items()}


def test_load_changes_neither_plan_nor_bound(graph: Graph, alone: dict[str, Plan]) -> None:
    with busy_processes():
        loaded = {name: make_plan(graph, MESH, plan.options) for name, plan in alone.items()}
    assert all(plan.found for plan in alone.values())
    for name, plan in alone.items():
        assert (name, loaded[name].stages) == (name, plan.stages)
        assert (name, loaded[name].certificate) == (name, plan.certificate)
        for one in (plan, loaded[name]):
            assert TIME_LIMIT_REACHED not in one.provenance.statistics
