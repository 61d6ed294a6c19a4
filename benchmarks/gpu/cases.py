"""The cases of the tests on ranks, with NCCL on a GPU; those that fail run on CPUs too."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from support.ranks import load_cases

from benchmarks.gpu.child import Job
from benchmarks.rank_cases import RankCases

_FOLDER = Path(__file__).parents[2] / "tests" / "runtime"

FILES = (
    "test_programs_on_ranks",
    "test_2_ranks",
    "test_models_on_ranks",
    "test_memory_on_ranks",
    "test_training_on_ranks",
    "test_training_loops_on_ranks",
    "test_regather_on_ranks",
    "test_weights_on_ranks",
    "test_kernels_on_ranks",
    "test_pipelines_on_ranks",
    "test_8_ranks",
    "test_6_ranks",
    "test_measurements_on_ranks",
)
"""Files of cases in the order of their value: what a plan computes comes first."""

_FEW = 3
"""Cases of a file that run where everything is small."""

_RESERVE = 30
"""Seconds at the end in which failed cases run on CPUs."""


def run(job: Job) -> None:
    """Run the cases that have no result, then on CPUs those that failed."""
    is_small = job.device == "cpu"
    errors = {name: result["error"] for name, result in job.done.items()}
    for name, error in _run(job, job.device, lambda name: name not in job.done, _RESERVE):
        errors[name] = error
        job.put(name, {"error": error})
    if is_small:
        return
    known = {name for name, result in job.done.items() if "error_on_cpu" in result}
    failed = {name for name, error in errors.items() if error} - known
    for name, error in _run(job, "cpu", failed.__contains__, 0):
        job.put(name, {"error": errors[name], "error_on_cpu": error})


def _run(
    job: Job, device: str, wanted: Callable[[str], bool], reserve: float
) -> Iterator[tuple[str, str]]:
    """Run the wanted cases, file after file; yields each with its error.

    Args:
        job: what this process has to do.
        device: of the ranks, "cuda" or "cpu".
        wanted: true for the names that are to run.
        reserve: seconds of the job that are left for others.
    """
    is_small = job.device == "cpu"
    with RankCases.started(device) as started:
        for file in FILES[:2] if is_small else FILES:
            path = _FOLDER / f"{file}.py"
            cases = load_cases(path)
            module = sys.modules[file]
            long = getattr(module, "LONG", ())
            names = [name for name in cases if name not in long and wanted(f"{file}: {name}")]
            names = names[: _FEW if is_small else None]
            seconds = job.deadline - reserve - monotonic()
            if names and seconds > 0:
                for name, error in started.run(path, module.NUM_RANKS, names, seconds):
                    yield f"{file}: {name}", error
