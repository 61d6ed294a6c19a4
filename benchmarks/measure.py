"""A single measurement in this process: of a checked plan, or of a search of meshes.

    python -m benchmarks.measure '{"archive": "gpt2.pt2", "mesh": [2, 4], "options": {},
                                   "most_memory": 12000000000}'
    python -m benchmarks.measure '{"archive": "gpt2.pt2", "num_devices": 8, "num_workers": 2,
                                   "options": {}}'

Prints JSON lines: {"phase": ...} at the start of each phase, so that the phase of a killed process
is known, and the result at the end.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from autoshard.checker import check_plan
from autoshard.errors import AutoshardError
from autoshard.graph import load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import SearchProgress, make_plan, search_meshes
from autoshard.report import operator_coverage
from autoshard.solve import Progress
from autoshard_solver_cache import FolderCache, NamespacedCache

T = TypeVar("T")

BYTES_PER_UNIT = 1 if sys.platform == "darwin" else 1024
"""Unit of `ru_maxrss`."""


class _Phases:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        _announce("formulate" if name == "plan" else name)
        start = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - start
        return result


def _announce(phase: str) -> None:
    """Print the start of a phase on standard output."""
    print(json.dumps({"phase": phase}), flush=True)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Load, plan and check; return the result, with the seconds of each phase.

    Args:
        case: `archive`, a path; `mesh` and `axes`, sizes and names; `options`, of planning;
            `most_memory`, bytes of address space that this process may use; `blocks`, a
            folder of solved blocks, optional.
    """
    _limit_memory(case["most_memory"])
    data = Path(case["archive"]).read_bytes()
    mesh = make_mesh(case["mesh"], axes=case.get("axes") or None)
    options = PlanOptions(**case["options"])
    tables = NamespacedCache(FolderCache(case["blocks"]), "blocks") if "blocks" in case else None
    phases, start, started = _Phases(), time.perf_counter(), time.process_time()
    graph = phases.run("load", lambda: load_graph(data))
    plan = phases.run(
        "plan", lambda: make_plan(graph, mesh, options, on_progress=_progress, block_cache=tables)
    )
    findings = phases.run("check", lambda: check_plan(plan, graph)) if plan.found else ()
    total = time.perf_counter() - start
    processor = time.process_time() - started
    coverage = operator_coverage(graph, plan) if plan.found else None
    return {
        "seconds": _split(phases.seconds, plan) | {"total": total},
        "processor": processor,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_UNIT,
        "step": plan.costs.total if plan.costs else None,
        "pipeline": _pipeline(plan),
        "held": plan.memory.peak if plan.memory else None,
        "certificate": plan.certificate.model_dump(mode="json"),
        "memory_conflict": plan.conflict is not None and plan.conflict.budget is not None,
        "reason": "; ".join((plan.reason, *findings)).strip("; "),
        "legal": plan.found and not findings,
        "operators": plan.graph.num_nodes,
        "parameters": plan.graph.num_parameters,
        "coverage": coverage.model_dump(mode="json") if coverage else None,
        "share_whole": coverage.share_whole if coverage else None,
    }


def _limit_memory(most: int) -> None:
    """Limit the address space, so that the process fails with a MemoryError beyond it."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _progress(progress: Progress | SearchProgress) -> None:
    _announce(f"solve: {progress.phase}")


def _pipeline(plan: Plan) -> dict[str, Any] | None:
    """The stages of a plan; None if it has one."""
    if plan.pipeline is None:
        return None
    return {
        "schedule": plan.pipeline.schedule,
        "ranks": len(plan.pipeline.ranks),
        "stages": len(plan.stages),
        "axes": dict(plan.stages[0].axes),
        "idle": plan.pipeline.bubble,
    }


def measure_search(case: dict[str, Any]) -> dict[str, Any]:
    """Search, and return the best mesh with seconds, those of the processor, and peak memory.

    Args:
        case: `archive`, a path; `num_devices`; `num_workers`, processes that plan; `options`.
    """
    start, options = time.perf_counter(), PlanOptions(**case["options"])
    found = search_meshes(
        load_graph(Path(case["archive"]).read_bytes()),
        case["num_devices"],
        options=options,
        num_workers=case["num_workers"],
        on_progress=_progress,
    )
    elapsed, best = time.perf_counter() - start, found[0]
    used = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "meshes": len(found),
        "planned": sum(candidate.plan is not None for candidate in found),
        "best": best.mesh.axis_sizes,
        "objective": best.objective,
        "gap": None if best.plan is None else best.plan.certificate.gap,
        "seconds": elapsed,
        "processor": sum(x.ru_utime + x.ru_stime for x in used),
        "peak": max(x.ru_maxrss for x in used) * BYTES_PER_UNIT,
    }


def _split(seconds: dict[str, float], plan: Plan) -> dict[str, float]:
    """Replace the seconds of planning by those of its phases; the remainder is `assemble`."""
    inner = plan.provenance.wall_time
    outer = {name: value for name, value in seconds.items() if name != "plan"}
    return outer | inner | {"assemble": seconds["plan"] - sum(inner.values())}


def main() -> int:
    """Measure the case of the only argument, and print the result."""
    try:
        case = json.loads(sys.argv[1])
        result = measure_search(case) if "num_devices" in case else measure(case)
    except (AutoshardError, MemoryError) as error:
        result = {"error": f"{type(error).__name__}: {error}".strip(": ")}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
