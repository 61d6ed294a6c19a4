"""Rank correlation of predicted and measured step times, for plans of a few models on gloo ranks.

    autoshard calibrate --nproc 4 --mesh 2,2 -o topology.json
    python -m benchmarks.ranking topology.json

Writes the rank correlations into docs/measured.md, and all plans into benchmarks/results. Each
round runs one step of every plan of a model, so that other load of the machine affects all plans
equally; times are medians. On a machine with other work, calibrate with `--busy` and rank with
`--busy`: the ranking then uses the processor time of all ranks, divided by the number of
processors.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from torch.distributed.device_mesh import init_device_mesh

from autoshard import LaunchContext, Plan, launch
from autoshard.measure.profiling import SyntheticStep
from autoshard.mesh import topology_from_json
from benchmarks.document import DOCS, RESULTS, caption, write_table
from benchmarks.ranked import MODELS

_DOCUMENT = DOCS / "measured.md"
_ROUNDS = 21

Seconds = tuple[float, float]
"""Wall time of a step on the slowest rank; processor time of all ranks per processor."""


def measured(launched: LaunchContext, documents: Sequence[str]) -> list[Seconds]:
    """Median seconds of a step of each plan."""
    torch.set_num_threads(1)
    plans = [Plan.from_json(text) for text in documents]
    meshes = {
        axes: init_device_mesh("cpu", sizes, mesh_dim_names=axes)
        for axes, sizes in {plan.mesh.axis_names: plan.mesh.axis_sizes for plan in plans}.items()
    }
    assert dist.get_world_size() == launched.plan.mesh.num_devices
    steps = [SyntheticStep(plan, meshes[plan.mesh.axis_names]) for plan in plans]
    rounds = [[_seconds(step) for step in steps] for _ in range(_ROUNDS + 1)][1:]
    slowest, together = (torch.tensor(rounds, dtype=torch.float64) for _ in range(2))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(together)
    together /= os.cpu_count() or 1
    return [
        (median(slowest[:, i, 0].tolist()), median(together[:, i, 1].tolist()))
        for i in range(len(steps))
    ]


def _seconds(step: SyntheticStep) -> Seconds:
    dist.barrier()
    wall, processor = perf_counter(), process_time()
    step()
    return perf_counter() - wall, process_time() - processor


HEAD = """| model | plans | rank correlation | measured / predicted |
|---|---:|---:|---:|"""
"""Of the rows that `summary` makes."""


def summary(name: str, plans: Mapping[str, Plan], seconds: Sequence[float]) -> str:
    """Spearman's rank correlation of a model's plans, and the range of the errors, as a row."""
    rows = _ordered(plans, seconds)
    correlation = spearmanr([row[0] for row in rows], [row[1] for row in rows]).statistic
    ratios = [time / predicted for predicted, time, _ in rows]
    least, most = min(ratios), max(ratios)
    return f"| {name} | {len(rows)} | {correlation:.3f} | {least:.2f} to {most:.2f} |"


def table(plans: Mapping[str, Plan], seconds: Sequence[float]) -> str:
    """Table of the plans, ordered by predicted time."""
    lines = ["| plan | predicted | measured | times as long |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {1e3 * predicted:.1f} ms | {1e3 * time:.1f} ms | {time / predicted:.2f} |"
        for predicted, time, name in _ordered(plans, seconds)
    ]
    return "\n".join(lines)


def _ordered(plans: Mapping[str, Plan], seconds: Sequence[float]) -> list[tuple[float, float, str]]:
    """Predicted and measured seconds of each plan with its name, by predicted time."""
    return sorted(
        (plan.costs.total + plan.costs.overlapped, time, name)
        for (name, plan), time in zip(plans.items(), seconds, strict=True)
        if plan.costs is not None
    )


def main() -> None:
    """Plan, run, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", type=Path)
    parser.add_argument("--busy", action="store_true", help="rank by processor time")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--details", type=Path, default=RESULTS / "ranking.md")
    options = parser.parse_args()
    topology = topology_from_json(options.topology.read_bytes())
    clock = "processor time per processor" if options.busy else "wall time"
    head = caption(f"{clock}, medians of {_ROUNDS} rounds; topology {topology.source}")
    parts, rows = [head], [HEAD]
    for name, ranked in MODELS.items():
        plans = dict(ranked.plans(topology))
        documents = [plan.to_json() for plan in plans.values()]
        seconds = launch(measured, next(iter(plans.values())), (documents,))[0]
        clocked = [pair[options.busy] for pair in seconds]
        parts += [f"**{name}**", table(plans, clocked)]
        rows.append(summary(name, plans, clocked))
        print("\n\n".join([*parts[-2:], rows[-1]]), flush=True)
    options.details.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    write_table(options.document, "ranking", "\n\n".join([head, "\n".join(rows)]))


if __name__ == "__main__":
    main()
