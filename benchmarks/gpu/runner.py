"""Runs the parts of a measurement as processes with a share of the time each.

A process prints a line of JSON for every result, which is written at once. A process that fails or
exceeds its share ends alone: its error is a part of the record.
"""

import json
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import IO

from benchmarks.gpu.records import Record

_SHOWN = 2000
"""Last characters of the output of a failed process that its error has."""

_TICK = 0.1
"""Seconds between looks at what processes print."""


@dataclass
class _Running:
    name: str
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    file: Path
    unread: bytes = b""

    @property
    def log(self) -> str:
        """The last of what it printed beside results."""
        return self.file.read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN:]


def run_part(
    commands: Mapping[str, Sequence[str]],
    record: Record,
    seconds: float,
    variables: Mapping[str, str],
) -> None:
    """Run the processes of a part until they end or the time is over.

    Args:
        commands: command line of each process, by name; they run side by side.
        record: gets the results.
        seconds: after which the processes are ended.
        variables: of their environment, beside that of this process.
    """
    deadline = monotonic() + seconds
    record.failures.clear()
    record.write()  # processes read it
    with TemporaryDirectory(prefix="gpu-logs-") as folder:
        started = [
            _start(name, command, Path(folder), variables) for name, command in commands.items()
        ]
        try:
            for running in _ended(started, deadline, record):
                if status := running.process.returncode:
                    record.add(running.name, None, f"ended with status {status}:\n{running.log}")
            for running in started:
                if running.process.poll() is None:
                    text = f"stopped after its share of {seconds:.0f} s:\n{running.log}"
                    record.add(running.name, None, text)
        finally:
            for running in started:
                _kill(running)
    record.complete = not record.failures
    record.write()


def _start(
    name: str, command: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> _Running:
    log = folder / name
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603  our own programs
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env={**os.environ, **variables},
            start_new_session=True,  # so that it is ended with the ranks that it started
        )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return _Running(name, process, process.stdout, log)


def _ended(started: Sequence[_Running], deadline: float, record: Record) -> Iterator[_Running]:
    """Record what processes print until the deadline; yields each when it has ended."""
    running = list(started)
    while running and monotonic() < deadline:
        sleep(_TICK)
        for one in tuple(running):
            ended = one.process.poll() is not None
            _record_lines(one, record)
            if ended:
                running.remove(one)
                yield one


def _record_lines(running: _Running, record: Record) -> None:
    found = running.output.read() or b""  # None if there is nothing yet
    *lines, running.unread = (running.unread + found).split(b"\n")
    for line in lines:
        fields = json.loads(line)
        name, error = fields["name"], fields.get("error", "")
        if name not in record.results:
            last = error.strip().rpartition("\n")[2]
            print(f"  {name}{f': {last}' * bool(error)}", flush=True)
        record.add(name, fields.get("result"), error)


def _kill(running: _Running) -> None:
    """End a process and all that it started, also in other sessions, as ranks of tests are."""
    below = _descendants(running.process.pid) if running.process.poll() is None else []
    with suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    running.process.wait()
    running.output.close()


def _descendants(pid: int) -> list[int]:
    """All processes below one that runs."""
    children = defaultdict[int, list[int]](list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = path.read_text(encoding="utf-8").rpartition(")")[2].split()[1]
            children[int(parent)].append(int(path.parent.name))
    found = children[pid]
    for one in found:
        found += children[one]
    return found
