"""Times of planning pipelines of large models, and what is chosen, into docs/performance.md.

    python -m benchmarks.pipelines --folder archives

Exports each model into the folder unless it is there, plans it twice with one block cache, and
prices the published layout with the same model of costs.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.graph import Graph, load_graph
from autoshard.mesh import make_mesh
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.planner import make_plan
from benchmarks.archives import archive
from benchmarks.document import caption, replace_table

_DOCUMENT = Path(__file__).parent.parent / "docs" / "performance.md"


@dataclass(frozen=True)
class Case:
    """A pipeline to plan.

    Attributes:
        title: for the table.
        model: name in `benchmarks.models`.
        axes: name and size of each mesh axis.
        options: of planning, beside the defaults.
    """

    title: str
    model: str
    axes: Mapping[str, int]
    options: Mapping[str, Any]


_AUTO = {"stages": "auto", "time_limit": 120}
CASES = (
    Case(
        "Llama-3-70B, 64 H100",
        "llama3-70b",
        {"dp": 8, "tp": 8},
        {**_AUTO, "micro_batches": 32},
    ),
    Case(
        "Llama-3-405B, 16,384 H100",
        "llama-3-405b-micro-batch",
        {"dp": 2048, "tp": 8},
        {**_AUTO, "micro_batches": 16},
    ),
    Case(
        "Llama-3-405B, as published: pp 16, dp 128, tp 8, interleaved",
        "llama-3-405b-micro-batch",
        {"pp": 16, "dp": 128, "tp": 8},
        {**_AUTO, "micro_batches": 16, "schedule": "Interleaved1F1B"},
    ),
    Case(
        "DeepSeek-V3, 2,048 H100",
        "deepseek-v3-micro-batch",
        {"dp": 256, "tp": 8},
        {**_AUTO, "micro_batches": 120},
    ),
    Case(
        "DeepSeek-V3, as published: pp 16, dp 128, bidirectional",
        "deepseek-v3-micro-batch",
        {"pp": 16, "dp": 128},
        {**_AUTO, "micro_batches": 120, "schedule": "DualPipeV"},
    ),
)


class Store(dict[str, bytes]):
    """A block cache in memory."""

    def put(self, key: str, body: bytes) -> None:
        """Keep bytes under a key."""
        self[key] = body


def measured(case: Case, graph: Graph) -> tuple[Plan, float, float]:
    """The plan of a case, and seconds to make it without and with cached blocks."""
    mesh = make_mesh(tuple(case.axes.values()), axes=tuple(case.axes), topology="h100-sxm")
    options, store = PlanOptions(**case.options), Store()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        plan = make_plan(graph, mesh, options, block_cache=store)
        seconds.append(time.perf_counter() - start)
    return plan, seconds[0], seconds[1]


def row(case: Case, plan: Plan, cold: float, cached: float) -> Sequence[str]:
    """Cells of the table."""
    times = f"{cold:.1f} s", f"{cached:.1f} s"
    pipeline = plan.pipeline
    if pipeline is None or plan.costs is None or plan.memory is None:
        what = "one stage" if plan.found else plan.reason
        return (case.title, *times, what, "", "", "", "")
    axes = " x ".join(f"{name} {size}" for name, size in plan.stages[0].axes)
    return (
        case.title,
        *times,
        f"{pipeline.schedule}, {len(pipeline.ranks)} ranks, {len(plan.stages)} stages, {axes}",
        f"{plan.costs.total:.2f} s",
        f"{pipeline.bubble:.1%}",
        f"{plan.memory.peak / 1e9:.0f} GB",
        f"{plan.certificate.gap or 0.0:.1%}",
    )


def main() -> None:
    """Plan all cases, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="exported models")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    options = parser.parse_args()
    header = ("case", "cold", "cached", "pipeline", "step", "idle", "memory", "gap")
    lines = [f"| {' | '.join(header)} |", "|---|---:|---:|---|---:|---:|---:|---:|"]
    for case in CASES:
        graph = load_graph(archive(case.model, options.folder).read_bytes())
        lines.append(f"| {' | '.join(row(case, *measured(case, graph)))} |")
        print(lines[-1], flush=True)
    text = "\n\n".join((caption("wall time, one run"), "\n".join(lines)))
    document = options.document.read_text(encoding="utf-8")
    options.document.write_text(replace_table(document, "pipelines", text), encoding="utf-8")


if __name__ == "__main__":
    main()
