"""Which rank failed first, and how.

When one rank fails, the others soon fail too: their collectives find nobody at the other end.
Each rank that fails therefore writes down its traceback and the time in a folder of the
launcher, which shows the first one.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM, Signals
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from autoshard.errors import LaunchError

_FOLDER = str(Path(__file__).parent)
_RUNPY = "<frozen runpy>"


@contextmanager
def failures_noted(folder: Path) -> Iterator[None]:
    """Write down what a rank raises, and end it with status 1 without a word."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever it is, the launcher shows it
        rank = int(os.environ["RANK"])
        note = {
            "rank": rank,
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "time": time.time_ns(),
            "traceback": _without_launcher(error),
        }
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(note), encoding="utf-8")
        part.rename(folder / f"{rank}.json")
        sys.exit(1)


def _without_launcher(error: Exception) -> str:
    """The traceback from where the user's program begins."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and _is_launcher(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_launcher(file: str) -> bool:
    return file == _RUNPY or file.startswith(_FOLDER)


def first_failure(folder: Path, failed: ChildFailedError) -> LaunchError:
    """The error of the rank that failed first, in the last attempt.

    A rank that was killed comes first: the others only missed it. SIGTERM is what the launcher
    sends itself to those that are left.
    """
    for rank, failure in failed.failures.items():
        if failure.exitcode < 0 and failure.exitcode != -SIGTERM:
            number = -failure.exitcode
            name = Signals(number).name if number in set(Signals) else f"signal {number}"
            return LaunchError(f"rank {rank} was ended by {name}", rank=rank)
    notes = [json.loads(path.read_bytes()) for path in folder.glob("*.json")]
    if notes:
        first = min(notes, key=lambda note: (-note["attempt"], note["time"]))
        return LaunchError(
            f"rank {first['rank']} failed:\n{first['traceback']}", rank=first["rank"]
        )
    rank, failure = failed.get_first_failure()
    return LaunchError(f"rank {rank} ended with status {failure.exitcode}", rank=rank)
