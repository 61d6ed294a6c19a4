"""Progress of planning and calibration on stderr, and Ctrl-C while a plan is made."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from autoshard.cli.rendering.output import console, errors
from autoshard.client import JobProgress
from autoshard.report.tables import milliseconds
from autoshard.requests.running import ProgressListener

if TYPE_CHECKING:
    from autoshard.measure.calibration import CalibrationProgress

_FIRST_LINE = 1.0
"""Seconds until the first line of progress, if stderr is no terminal; the time then doubles."""

_MAX_INTERVAL = 60.0
"""Largest number of seconds between two lines."""


@dataclass(frozen=True)
class RunningRequest:
    """A request for plans that is under way.

    Attributes:
        report: the listener for its progress.
        stop: set by the first Ctrl-C; the request then ends with the best plan so far.
    """

    report: ProgressListener
    stop: Event = field(default_factory=Event)


@contextmanager
def followed(*, quiet: bool, can_stop: bool = True) -> Iterator[RunningRequest]:
    """Show the progress of a request for plans on stderr, and let Ctrl-C stop it.

    On a terminal it is a bar that fills as the gap closes, and is removed at the end. Elsewhere it
    is a line after 1, 2, 4, ... seconds.

    Args:
        quiet: show nothing.
        can_stop: let the first Ctrl-C set `stop`; otherwise it ends the command.
    """
    show = _hidden() if quiet else _bar() if errors.is_terminal else _lines()
    with show as report:
        run = RunningRequest(report)
        if can_stop and threading.current_thread() is threading.main_thread():
            with _stopping(run.stop):
                yield run
        else:
            yield run


@contextmanager
def calibration_progress(*, is_first: bool) -> Iterator[Callable[["CalibrationProgress"], None]]:
    """Show how far a calibration is: a progress bar on terminals, otherwise a line per stage.

    Args:
        is_first: False on other ranks, which show nothing.

    Yields:
        the listener for its progress.
    """
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    is_shown = console.is_terminal
    stages: set[str] = set()
    with Progress(
        *columns, console=console, transient=True, disable=not (is_shown and is_first)
    ) as bar:
        task = bar.add_task("", total=None)

        def report(found: "CalibrationProgress") -> None:
            bar.update(task, description=found.stage, completed=found.done, total=found.total)
            if not is_shown and found.stage not in stages:
                stages.add(found.stage)
                text = f"{found.stage} ({found.done} of {found.total} measurements are made)"
                console.print(text, soft_wrap=True)

        yield report


@contextmanager
def _stopping(stop: Event) -> Iterator[None]:
    """Set an event at the first Ctrl-C; the second one raises KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        errors.print(
            "stopping: the best plan so far is shown; press Ctrl-C again to end at once",
            soft_wrap=True,
        )

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _hidden() -> Iterator[ProgressListener]:
    yield lambda _: None


@contextmanager
def _bar() -> Iterator[ProgressListener]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("starting", total=None, figures="")

        def report(job: JobProgress) -> None:
            progress.update(
                task,
                description=job.phase,
                total=None if job.gap is None else 1.0,
                completed=0.0 if job.gap is None else max(0.0, 1.0 - job.gap),
                figures=_figures(job),
            )

        yield report


@contextmanager
def _lines() -> Iterator[ProgressListener]:
    latest = JobProgress(phase="starting", elapsed=0.0)
    start, is_done = time.monotonic(), Event()

    def report(job: JobProgress) -> None:
        nonlocal latest
        latest = job

    def print_lines() -> None:
        interval = _FIRST_LINE
        while not is_done.wait(interval):
            seconds = time.monotonic() - start
            figures = ", ".join(filter(None, (latest.phase, _figures(latest))))
            errors.print(f"planning, {seconds:.0f} s: {figures}", soft_wrap=True, highlight=False)
            interval = min(seconds, _MAX_INTERVAL)

    thread = Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield report
    finally:
        is_done.set()
        thread.join()


def _figures(job: JobProgress) -> str:
    """Step time of the best plan so far, lower bound, and the gap between them."""
    figures = {"best": job.incumbent, "bound": job.bound}
    known = [f"{name} {milliseconds(s)}" for name, s in figures.items() if s is not None]
    if job.gap is not None:
        known.append(f"gap {job.gap:.2%}")
    return ", ".join(known)
