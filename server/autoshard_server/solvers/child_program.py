"""The program of a child process: reads one job from stdin, and writes messages to stdout.

It ends when the process of the service ends, which closes its stdin.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import IO, Any

from autoshard_server.problems import ProblemType, problem_of, problem_type_of
from autoshard_server.solvers.messages import (
    Failed,
    FrameKind,
    Progressed,
    Solved,
    SolverInput,
    encode,
    read_frame,
    write_frame,
)

_log = logging.getLogger(__name__)

Report = Callable[[Mapping[str, Any]], None]


def run_job(prepare: Callable[[], Callable[[SolverInput, Report], Solved]]) -> None:
    """Run the job that arrives on stdin.

    Args:
        prepare: called before a job arrives; returns the function that runs it, whose errors
            become the result.
    """
    source = sys.stdin.buffer
    messages = _claim_stdout()
    run = prepare()
    with suppress(OSError):
        # If the service has died, reading stdin ends this process.
        write_frame(messages, FrameKind.READY, b"")
    request, payload = _expect(source, FrameKind.REQUEST), _expect(source, FrameKind.GRAPH)
    Thread(target=_end_with_service, daemon=True).start()

    def report(progress: Mapping[str, Any]) -> None:
        write_frame(messages, *encode(Progressed(progress)))

    try:
        outcome: Solved | Failed = run(SolverInput(request.decode(), payload), report)
    except Exception as error:  # noqa: BLE001  every error becomes the result
        if problem_type_of(error) is ProblemType.INTERNAL:
            _log.exception("the job failed")
        outcome = Failed(problem_of(error))
    write_frame(messages, *encode(outcome))


def _claim_stdout() -> IO[bytes]:
    """Reserve stdout for messages: all other output, also of C libraries, goes to stderr."""
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return messages


def _expect(source: IO[bytes], kind: FrameKind) -> bytes:
    frame = read_frame(source)
    if frame is None:
        # The service had no job for this process before it ended.
        sys.exit(0)
    if frame[0] is not kind:
        raise ValueError(f"expected a frame of kind {kind.name}, got {frame[0].name}")
    return frame[1]


def _end_with_service() -> None:
    # Not through sys.stdin: its lock, held by a daemon thread, would abort a normal exit.
    os.read(0, 1)
    os._exit(1)
