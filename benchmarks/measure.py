"""One measurement: from the bytes of an archive to a checked plan, in this process.

    python -m benchmarks.measure '{"archive": "gpt2.pt2", "mesh": [2, 4], "options": {},
                                   "most_memory": 12000000000}'

Prints JSON lines: {"phase": ...} as each phase begins, so that whoever ends the process
knows how far it came, and at last the result.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from autoshard.errors import AutoshardError
from autoshard.graph import load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions, check_plan, operator_coverage
from autoshard.planner import make_plan
from autoshard.solve import Progress
from autoshard_solver_cache import FolderCache, NamespacedCache

T = TypeVar("T")

_BYTES_PER_UNIT = 1 if sys.platform == "darwin" else 1024
"""What `ru_maxrss` counts in."""


class _Phases:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        announce("formulate" if name == "plan" else name)
        start = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - start
        return result


def announce(phase: str) -> None:
    """Say on standard output that a phase begins."""
    print(json.dumps({"phase": phase}), flush=True)


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Load, plan and check; what came out, with the seconds of each phase.

    Args:
        asked: `archive`, a path; `mesh`, the size of each axis; `options`, of planning;
            `most_memory`, bytes of address space that this process may take; `blocks`, a
            folder of solved blocks, if there is one.
    """
    _limit_memory(asked["most_memory"])
    data = Path(asked["archive"]).read_bytes()
    mesh, options = make_mesh(asked["mesh"]), PlanOptions.model_validate(asked["options"])
    tables = NamespacedCache(FolderCache(asked["blocks"]), "blocks") if "blocks" in asked else None
    phases, start = _Phases(), time.perf_counter()
    graph = phases.run("load", lambda: load_graph(data))
    plan = phases.run(
        "plan", lambda: make_plan(graph, mesh, options, on_progress=_announce, block_cache=tables)
    )
    findings = phases.run("check", lambda: check_plan(plan, graph)) if plan.found else ()
    total = time.perf_counter() - start
    coverage = operator_coverage(graph, plan) if plan.found else None
    return {
        "seconds": _split(phases.seconds, plan) | {"total": total},
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_UNIT,
        "held": plan.memory.peak if plan.memory else None,
        "budget": options.memory_budget or mesh.topology.device.memory,
        "certificate": plan.certificate.model_dump(mode="json"),
        "memory_conflict": plan.conflict is not None and plan.conflict.budget is not None,
        "reason": "; ".join((plan.reason, *findings)).strip("; "),
        "legal": plan.found and not findings,
        "sizes": {name: plan.provenance.statistics[name] for name in ("nodes", "strategies")},
        "operators": plan.graph.num_nodes,
        "parameters": plan.graph.num_parameters,
        "coverage": coverage.model_dump(mode="json") if coverage else None,
        "share_whole": coverage.share_whole if coverage else None,
    }


def _limit_memory(most: int) -> None:
    """Fail with a MemoryError rather than take the whole machine down."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _announce(progress: Progress) -> None:
    announce(f"solve: {progress.phase}")


def _split(seconds: dict[str, float], plan: Plan) -> dict[str, float]:
    """The planner's own phases in place of one figure; what they leave is assembly."""
    inner = plan.provenance.wall_time
    outer = {name: value for name, value in seconds.items() if name != "plan"}
    return outer | inner | {"assemble": seconds["plan"] - sum(inner.values())}


def main() -> int:
    """Measure what the only argument asks for, and print the result."""
    try:
        result = measure(json.loads(sys.argv[1]))
    except (AutoshardError, MemoryError) as error:
        result = {"error": f"{type(error).__name__}: {error}".strip(": ")}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
