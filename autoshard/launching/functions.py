"""Launches a function on the ranks of a plan, and reports the rank that failed first.

If one rank fails, the others soon fail too, in collectives with the missing rank. Each failing
rank therefore writes its traceback and the time to a folder, and the launcher reports the first.
"""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM, Signals
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autoshard.base.arguments import check_arguments
from autoshard.errors import LaunchError
from autoshard.launching.context import LaunchContext, check_world, join
from autoshard.plan import Plan

T = TypeVar("T")

_FOLDER = str(Path(__file__).parent)
_RUNPY = "<frozen runpy>"


@check_arguments
def launch(
    function: Callable[..., T], plan: Plan, args: Sequence[Any] = (), *, timing: bool = False
) -> list[T]:
    """Run a function on every rank of a plan, all of them on this machine.

    Args:
        function: called with a `LaunchContext` and `args`, in one process per rank; it must be
            defined at the top level of a module.
        plan: the plan.
        args: arguments of the function; pickled for every rank, as in `multiprocessing`.
        timing: True if rank 0 prints the duration of each `LaunchContext.step`.

    Returns:
        The function's result on each rank.

    Raises:
        PlanError: the document contains no plan.
        LaunchError: a rank failed; the message has its traceback.
    """
    check_world(plan, plan.mesh.num_devices)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.mesh.num_devices,
        run_id=str(uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    with TemporaryDirectory(prefix="autoshard-launch-") as folder:
        try:
            with _quiet():
                settings = _Settings(plan.to_json(), folder, timing)
                results = elastic_launch(config, _rank)(settings, function, tuple(args))
        except ChildFailedError as failed:
            raise first_failure(Path(folder), failed) from None
    return [results[rank] for rank in sorted(results)]


class _Settings(NamedTuple):
    """The plan as JSON, the folder for failures, and True if steps are timed."""

    plan: str
    folder: str
    timing: bool


def _rank(settings: _Settings, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    with failures_recorded(Path(settings.folder)):
        context: LaunchContext = join(Plan.from_json(settings.plan), timing=settings.timing)
        result = function(context, *args)
        context.close()
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the elastic launcher's log of a failed rank, which repeats the traceback."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def failures_recorded(folder: Path) -> Iterator[None]:
    """If the rank raises an exception, write it to the folder and exit with status 1."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the launcher shows any exception
        rank = int(os.environ["RANK"])
        record = {
            "rank": rank,
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "time": time.time_ns(),
            "traceback": _without_launcher(error),
        }
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(record), encoding="utf-8")
        part.rename(folder / f"{rank}.json")
        sys.exit(1)


def _without_launcher(error: Exception) -> str:
    """The traceback from the first frame of the user's program."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and _is_launcher(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_launcher(file: str) -> bool:
    return file == _RUNPY or file.startswith(_FOLDER)


def first_failure(folder: Path, failed: ChildFailedError) -> LaunchError:
    """The error of the rank that failed first, in the last attempt.

    A rank killed by a signal counts as the first, since it leaves no record. SIGTERM does not
    count: the launcher sends it to the remaining ranks.
    """
    for rank, failure in failed.failures.items():
        if failure.exitcode < 0 and failure.exitcode != -SIGTERM:
            number = -failure.exitcode
            name = Signals(number).name if number in set(Signals) else f"signal {number}"
            return LaunchError(f"rank {rank} was ended by {name}", rank=rank)
    records = [json.loads(path.read_bytes()) for path in folder.glob("*.json")]
    if records:
        first = min(records, key=lambda record: (-record["attempt"], record["time"]))
        return LaunchError(
            f"rank {first['rank']} failed:\n{first['traceback']}", rank=first["rank"]
        )
    rank, failure = failed.get_first_failure()
    return LaunchError(f"rank {rank} ended with status {failure.exitcode}", rank=rank)
