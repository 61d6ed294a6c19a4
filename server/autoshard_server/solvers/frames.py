"""Messages between the service and a solver process: a kind, a length, and plain bytes.

Nothing is pickled: a frame is eight bytes of big-endian length, one byte of kind, and the
body.
"""

import struct
from enum import Enum
from typing import IO

_HEADER = struct.Struct(">Qc")

MAX_BODY = 1 << 32
"""No graph and no plan is longer; more means that the stream is not ours."""


class FrameKind(Enum):
    """What the body of a frame is."""

    WORK = b"w"
    """To the solver: JSON with mesh, options and limits."""
    GRAPH = b"g"
    """To the solver: the uploaded bytes."""
    READY = b"h"
    """From the solver, before anything else: it has all that it needs, and waits for work."""
    PROGRESS = b"p"
    """From the solver: JSON with phase, incumbent, bound and gap."""
    PLAN = b"r"
    """From the solver: the plan document."""
    UNFINISHED = b"u"
    """From the solver: a plan document that must not be kept, since time ran out."""
    PROBLEM = b"e"
    """From the solver: problem details as JSON."""


def write_frame(stream: IO[bytes], kind: FrameKind, body: bytes) -> None:
    """Send one message.

    Raises:
        OSError: the other side is gone.
    """
    stream.write(_HEADER.pack(len(body), kind.value))
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[FrameKind, bytes] | None:
    """Receive one message; None where the stream ends, even in the middle of one.

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
