"""A measured mesh search, from the bytes of an archive to the candidates, in this process.

    python -m benchmarks.searching '{"archive": "gpt2.pt2", "num_devices": 8, "num_workers": 2,
                                     "options": {}}'

Prints JSON lines: {"phase": ...} for each mesh, and the result at the end.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.graph import load_graph
from autoshard.plan import PlanOptions
from autoshard.planner import SearchProgress, search_meshes
from benchmarks.measure import BYTES_PER_UNIT, announce


def measure(case: dict[str, Any]) -> dict[str, Any]:
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
        on_progress=_announce,
    )
    elapsed, best = time.perf_counter() - start, found[0]
    used = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    gap = None if best.plan is None else best.plan.certificate.gap
    return {
        "meshes": len(found),
        "planned": sum(candidate.plan is not None for candidate in found),
        "best": best.mesh.axis_sizes,
        "objective": best.objective,
        "gap": gap,
        "seconds": elapsed,
        "processor": sum(x.ru_utime + x.ru_stime for x in used),
        "peak": max(x.ru_maxrss for x in used) * BYTES_PER_UNIT,
    }


def _announce(progress: SearchProgress) -> None:
    announce(progress.phase)


def main() -> int:
    """Measure the case of the only argument, and print the result."""
    try:
        result = measure(json.loads(sys.argv[1]))
    except (AutoshardError, MemoryError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
