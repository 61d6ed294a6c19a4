"""Start-up times: the command line's version and help, and the import of the client.

Each measurement is a fresh process; the first of each command is not counted, since it may compile
modules. The processor's time is that of the process, so other load of the machine counts little.
"""

import os
import subprocess
import sys
import time
from statistics import median

_COMMANDS = {
    "`python -c pass`": ("-c", "pass"),
    "`autoshard --version`": ("-m", "autoshard.cli", "--version"),
    "`autoshard --help`": ("-m", "autoshard.cli", "--help"),
    "`from autoshard import Client`": ("-c", "from autoshard import Client"),
    "`from autoshard import make_plan`": ("-c", "from autoshard import make_plan"),
}


def measure_startup(repetitions: int) -> list[tuple[str, str, str]]:
    """Median seconds of each command, and of the processor, as rows of a table."""
    found = []
    for name, arguments in _COMMANDS.items():
        runs = [_seconds(arguments) for _ in range(repetitions + 1)][1:]
        elapsed, processor = (median(times) for times in zip(*runs, strict=True))
        found.append((name, f"{elapsed:.2f}", f"{processor:.2f}"))
    return found


def _seconds(arguments: tuple[str, ...]) -> tuple[float, float]:
    start, before = time.perf_counter(), os.times()
    subprocess.run(  # noqa: S603  our own commands
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL
    )
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return time.perf_counter() - start, used
