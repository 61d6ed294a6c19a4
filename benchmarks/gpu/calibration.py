"""A quick calibration of the device, and the prices that it would change."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autoshard import PlanOptions, export_model, get_topology, load_graph, make_mesh, make_plan
from autoshard.measure import calibration
from autoshard.mesh import Topology, topology_to_json
from benchmarks.gpu.child import Job
from benchmarks.gpu.models import CASES
from benchmarks.gpu.ranks import free_port, rank_variables

_LEAST = replace(calibration.QUICK, elements=(1 << 14,), num_rounds=1, num_runs=1, num_repeats=1)
"""Enough to try it."""


def run(job: Job) -> None:
    """Calibrate, then plan the models with the topology that was found."""
    preset = get_topology(job.topology)
    partial = job.folder / "calibration.partial"
    os.environ.update(rank_variables(0, 1, free_port()))
    with calibration.process_groups():
        effort = _LEAST if job.device == "cpu" else calibration.QUICK
        found = calibration.calibrate(links=preset, effort=effort, partial_file=partial).topology
    partial.unlink(missing_ok=True)
    job.put(
        "device",
        {"figures": dict(_figures(preset, found)), "topology": topology_to_json(found)},
    )
    for model in job.models:
        graph = load_graph(export_model(*CASES[model].on(job.device).export_arguments()))
        for execution in ("eager", "compile"):
            seconds = {}
            for name, topology in (("preset", preset), ("calibrated", found)):
                mesh = make_mesh((1,), axes=("one",), topology=topology)
                plan = make_plan(graph, mesh, PlanOptions(execution=execution))
                assert plan.costs is not None
                seconds[name] = plan.costs.total
            job.put(f"{model}, {execution}", seconds)


def _figures(preset: Topology, found: Topology) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Figures of a device, as in the preset and as measured."""
    one, other = preset.device, found.device
    for dtype in sorted({*one.peak_flops} & {*other.peak_flops}):
        name = f"{dtype}, FLOP/s"
        yield name, {"preset": one.peak_flops[dtype], "calibrated": other.peak_flops[dtype]}
    for name in ("memory_bandwidth", "launch_overhead"):
        yield name, {"preset": getattr(one, name), "calibrated": getattr(other, name)}
