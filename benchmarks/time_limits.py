"""Seconds that requests take under a time limit: pipelines, memory budgets and searches.

Each request is made with limits of 0.5, 5 and 60 seconds, from a graph that is loaded. A request
may take a tenth and two seconds more than its limit; a search has this time for each mesh. Run
`python -m benchmarks.time_limits` on a quiet machine; it writes
benchmarks/results/time_limits.json, and the exit status is 1 if a request took longer.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autoshard.graph import Graph, load_graph
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan, search_meshes
from benchmarks.models import MODELS

RESULT = Path(__file__).parent / "results" / "time_limits.json"
LIMITS = (0.5, 5.0, 60.0)
_SHARE, _SECONDS = 1.1, 2.0
"""Allowed time of each mesh of a request: this share of the limit, and these seconds more."""


@dataclass(frozen=True)
class Timed:
    """A request with a time limit.

    Attributes:
        request: in words.
        limit: its time limit for each mesh, seconds.
        meshes: the number of meshes that it plans.
        seconds: that it took.
        status: of its plan, or the number of meshes that have a plan.
    """

    request: str
    limit: float
    meshes: int
    seconds: float
    status: str

    @property
    def is_late(self) -> bool:
        """True if it took longer than it may."""
        return self.seconds > self.meshes * (_SHARE * self.limit + _SECONDS)


@cache
def graph_of(name: str) -> Graph:
    """The program of a model."""
    return load_graph(MODELS[name].export())


def _planned(name: str, mesh: str, **options: Any) -> Callable[[float], tuple[int, str]]:
    def run(limit: float) -> tuple[int, str]:
        plan = make_plan(graph_of(name), mesh, time_limit=limit, **options)
        return 1, plan.certificate.status.value

    return run


def _searched(name: str, num_devices: int) -> Callable[[float], tuple[int, str]]:
    def run(limit: float) -> tuple[int, str]:
        options = PlanOptions(time_limit=limit)
        found = search_meshes(graph_of(name), num_devices, options=options, num_workers=1)
        planned = sum(one.plan is not None and one.plan.found for one in found)
        return len(found), f"{planned} of {len(found)} meshes"

    return run


REQUESTS: dict[str, Callable[[float], tuple[int, str]]] = {
    "GPT-2 on 2x4, 3 GB": _planned("gpt2", "2x4", memory_budget="3GB"),
    "GPT-2 on pp=4,dp=2, stages auto": _planned(
        "gpt2", "pp=4,dp=2", stages="auto", micro_batches=8
    ),
    "GPT-2, all meshes of 8": _searched("gpt2", 8),
    "Llama-3-8B on 8x8, 24 GB": _planned("llama3-8b", "8x8", memory_budget="24GB"),
    "Llama-3-8B on pp=4,dp=2,tp=8, 4 stages": _planned(
        "llama3-8b", "pp=4,dp=2,tp=8", stages=4, micro_batches=8
    ),
    "Llama-3-8B on 4x4x4, stages auto": _planned(
        "llama3-8b", "4x4x4", stages="auto", micro_batches=8
    ),
    "Llama-3-8B, all meshes of 16": _searched("llama3-8b", 16),
}


def measure() -> Iterator[Timed]:
    """Make all requests, with each limit in turn."""
    for request, run in REQUESTS.items():
        for limit in LIMITS:
            begun = time.perf_counter()
            meshes, status = run(limit)
            yield Timed(request, limit, meshes, round(time.perf_counter() - begun, 2), status)


def main() -> int:
    """Time the requests, and write what was found."""
    argparse.ArgumentParser(description="Time requests with time limits.").parse_args()
    warnings.simplefilter("ignore")
    for name in ("gpt2", "llama3-8b"):
        graph_of(name)
    found = []
    for timed in measure():
        print(f"{timed.request}, {timed.limit:g} s: {timed.seconds} s, {timed.status}", flush=True)
        found.append(timed)
    late = sum(timed.is_late for timed in found)
    print(f"{len(found)} requests, {late} late")
    record = {"requests": [asdict(timed) for timed in found], "late": late}
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
