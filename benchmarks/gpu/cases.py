"""The cases of the tests on ranks, with NCCL on a GPU; those that fail run on CPUs too."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from benchmarks.gpu.child import Job
from benchmarks.rank_cases import RankCases

_FOLDER = Path(__file__).parents[2] / "tests" / "runtime"

FILES = (
    "cases_on_4_ranks",
    "test_2_ranks",
    "test_regather_on_ranks",
    "test_8_ranks",
    "test_6_ranks",
)
"""Files of cases in the order of their value."""

_FEW = 3
"""Cases of a file that run where everything is small."""

_RESERVE = 30
"""Seconds at the end in which failed cases run on CPUs."""


def run(job: Job) -> None:
    """Run the cases that have no result, then on CPUs those that failed.

    Raises:
        SystemExit: the time was over before all had run.
    """
    errors = {name: result["error"] for name, result in job.done.items()}
    left: list[str] = []
    for name, error in _run(job, job.device, lambda name: name not in job.done, left):
        errors[name] = error
        job.put(name, {"error": error})
    if job.device != "cpu":
        known = {name for name, result in job.done.items() if "error_on_cpu" in result}
        failed = {name for name, error in errors.items() if error} - known
        for name, error in _run(job, "cpu", failed.__contains__, left):
            job.put(name, {"error": errors[name], "error_on_cpu": error})
    if left:
        raise SystemExit(f"{len(left)} cases have not run: {', '.join(left)}")


def _run(
    job: Job, device: str, wanted: Callable[[str], bool], left: list[str]
) -> Iterator[tuple[str, str]]:
    """Run the wanted cases, file after file; yields each with its error.

    Args:
        job: what this process has to do.
        device: of the ranks, "cuda" or "cpu".
        wanted: true for the names that are to run.
        left: gets the names of those for which there was no time.
    """
    reserve = _RESERVE if device == "cuda" else 0
    with RankCases.started(device) as started:
        for file in FILES[:2] if job.device == "cpu" else FILES:
            path = _FOLDER / f"{file}.py"
            num_ranks, known = started.names(path)
            names = [name for name in known if wanted(f"{file}: {name}")]
            names = names[: _FEW if job.device == "cpu" else None]
            seconds = job.deadline - reserve - monotonic()
            if names and seconds > 0:
                for name, error in started.run(path, num_ranks, names, seconds):
                    names.remove(name)
                    yield f"{file}: {name}", error
            left += [f"{file}: {name}" for name in names]
