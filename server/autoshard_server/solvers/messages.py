"""Messages between a worker and a solver, and their frames: a kind, a length and plain bytes.

Nothing is pickled: a frame is eight bytes of big-endian length, one byte of kind, and the body.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

_HEADER = struct.Struct(">Qc")

MAX_BODY = 1 << 32
"""Largest body in bytes; no graph or plan is larger, so a larger frame is not a solver's."""


class FrameKind(Enum):
    """Kinds of frames."""

    REQUEST = b"w"
    """To the solver: JSON with mesh, options and limits."""
    GRAPH = b"g"
    """To the solver: the uploaded bytes."""
    READY = b"h"
    """From the solver, as its first frame: all modules are imported, and it waits for a job."""
    PROGRESS = b"p"
    """From the solver: JSON with phase, incumbent, bound and gap."""
    RESULT = b"r"
    """From the solver: the document."""
    TRANSIENT_RESULT = b"u"
    """From the solver: a document that must not be cached, because time ran out."""
    PROBLEM = b"e"
    """From the solver: problem details as JSON."""
    DIED = b"d"
    """From an actor: problem details of a solver that died after it was ready."""
    DIED_EARLY = b"x"
    """From an actor: problem details of a solver that died before it was ready."""


@dataclass(frozen=True, slots=True)
class SolverInput:
    """A job for a solver.

    Attributes:
        request: JSON text with result id, mesh, options and limits.
        graph: the uploaded bytes, or a plan document.
    """

    request: str
    graph: bytes


@dataclass(frozen=True, slots=True)
class Progressed:
    """The solver reports progress: phase, incumbent, bound and gap."""

    progress: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Solved:
    """The solver has finished.

    Attributes:
        document: the result.
        cacheable: true if the same request may get it again: false if a time limit ended before a
            plan was found, or before all operators without a rule were tried.
    """

    document: bytes
    cacheable: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The solver has ended with problem details."""

    problem: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Died:
    """The solver has died without a result, for a reason that may not be its job.

    Attributes:
        problem: details, for the job's last attempt.
        was_ready: true if it had reported that it was ready; if not, all solvers may be broken.
    """

    problem: Mapping[str, Any]
    was_ready: bool


Message = Progressed | Solved | Failed | Died


def encode(message: Message) -> tuple[FrameKind, bytes]:
    """The frame of a message."""
    match message:
        case Solved():
            kind = FrameKind.RESULT if message.cacheable else FrameKind.TRANSIENT_RESULT
            return kind, message.document
        case Progressed():
            return FrameKind.PROGRESS, json.dumps(message.progress).encode()
        case Failed():
            return FrameKind.PROBLEM, json.dumps(message.problem).encode()
        case Died():
            kind = FrameKind.DIED if message.was_ready else FrameKind.DIED_EARLY
            return kind, json.dumps(message.problem).encode()


def decode(kind: FrameKind, body: bytes) -> Message:
    """The message of a frame.

    Raises:
        ValueError: the frame is not one of a solver, or is not JSON.
    """
    match kind:
        case FrameKind.RESULT | FrameKind.TRANSIENT_RESULT:
            return Solved(body, cacheable=kind is FrameKind.RESULT)
        case FrameKind.PROGRESS:
            return Progressed(json.loads(body))
        case FrameKind.PROBLEM:
            return Failed(json.loads(body))
        case FrameKind.DIED | FrameKind.DIED_EARLY:
            return Died(json.loads(body), was_ready=kind is FrameKind.DIED)
        case _:
            raise ValueError(f"a solver does not send frames of kind {kind.name}")


def write_frame(stream: IO[bytes], kind: FrameKind, body: bytes) -> None:
    """Write one frame.

    Raises:
        OSError: the other process is gone.
    """
    stream.write(_HEADER.pack(len(body), kind.value))
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[FrameKind, bytes] | None:
    """Read one frame; None at the end of the stream, even in the middle of a frame.

    Raises:
        ValueError: the bytes are not a frame.
    """
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    length, kind = _HEADER.unpack(header)
    if length > MAX_BODY:
        raise ValueError(f"a frame of {length:,} bytes is longer than {MAX_BODY:,}")
    body = stream.read(length)
    return (FrameKind(kind), body) if len(body) == length else None
