"""Compressed request bodies: decompressed as they arrive, with limits before and after."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard
from anyio.lowlevel import checkpoint
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.settings import Settings

_GZIP_SLICE = 4096
"""Bytes decompressed at once: a byte decompresses to at most 1032, so the result to 4 MiB."""

_ZSTD_SLICE = 256
"""The same for zstd: four bytes may decompress to 128 KiB, so the result to 8 MiB."""

_ZSTD_WINDOW = 1 << 23
"""Largest window of a frame, in bytes; RFC 8878 requires decoders to support no more."""


_MAX_STREAMS = 256
"""Largest number of streams one after the other in a body: an empty one of a few bytes costs as
much work as the start of a large one."""

_PIECE_BYTES = 1 << 18
"""Decompressed bytes after which other requests are served."""

_FREE_BYTES = 1 << 20
"""Bytes of each body to which the ratio does not apply."""

_SMALL_BYTES = 1 << 16
"""Bytes of each body to which the limit of all bodies does not apply."""


class BodyLimit:
    """Refuses bodies over a limit, before reading if Content-Length exceeds it.

    Bodies with a Content-Encoding of gzip or zstd are decompressed, and the limit applies to the
    compressed and the decompressed bytes. The ratio of the two, and the bytes of all bodies
    together, have limits too.

    Args:
        app: the wrapped application.
        settings: with the limits.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._memory = _MemoryLimit(settings.max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, Headers(scope=scope), self._settings, self._memory)
        if body.is_compressed:
            headers = MutableHeaders(raw=list(scope["headers"]))
            # The application gets the decompressed body.
            for name in ("content-encoding", "content-length"):
                if name in headers:
                    del headers[name]
            scope["headers"] = headers.raw
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()


class _MemoryLimit:
    """The memory of all bodies together.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    def take(self, count: int) -> None:
        if self._used + count > self._limit:
            raise limit_error(
                ProblemType.UNAVAILABLE,
                "the service is reading other large bodies; retry",
                "max_bodies_bytes",
                self._limit,
                headers={"Retry-After": "2", "Connection": "close"},
            )
        self._used += count

    def give_back(self, count: int) -> None:
        self._used -= count


class _Body:
    def __init__(
        self, receive: Receive, headers: Headers, settings: Settings, memory: _MemoryLimit
    ) -> None:
        self._receive = receive
        self._limit = settings.max_body_bytes
        self._max_ratio = settings.max_compression_ratio
        self._memory = memory
        self._coding = headers.get("content-encoding", "identity").strip().lower()
        self._decoder: _Decoder | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._has_more = True
        self._is_over = False
        length = headers.get("content-length", "")
        self._announced = int(length) if length.isdecimal() else 0
        self._received = self._size = self._taken = 0

    @property
    def is_compressed(self) -> bool:
        return self._coding not in ("", "identity")

    async def receive(self) -> Message:
        if self._announced > self._limit:
            raise self._too_large("")
        if not self.is_compressed:
            message = await self._receive_counted()
            self._count(len(message.get("body", b"")))
            return message
        return await self._receive_piece(self._decoder or self._open())

    def release(self) -> None:
        """The request is over, so its body is no longer in memory."""
        self._memory.give_back(self._taken)

    def _open(self) -> "_Decoder":
        self._decoder = _decoder(self._coding)
        return self._decoder

    async def _receive_counted(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._received > self._limit:
                raise self._too_large("")
        return message

    async def _receive_piece(self, decoder: "_Decoder") -> Message:
        """The next decompressed piece; other requests are served between two."""
        while not self._is_over:
            piece = self._decompress()
            await checkpoint()
            if piece:
                return {"type": "http.request", "body": piece, "more_body": True}
            if not self._has_more:
                self._is_over = True
                self._check_complete(decoder)
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive_counted()
            if message["type"] != "http.request":
                return message
            self._pieces = decoder.feed(message.get("body", b""))
            self._has_more = message.get("more_body", False)
        return await self._receive()

    def _decompress(self) -> bytes:
        """More of what has been received; empty if there is no more."""
        body = bytearray()
        try:
            for piece in self._pieces:
                self._count(len(piece))
                body += piece
                if len(body) >= _PIECE_BYTES:
                    break
        except (zlib.error, zstandard.ZstdError) as error:
            detail = f"the body is not {self._coding}: {error}"
            raise ServerError(ProblemType.CONTENT_CODING, detail) from None
        return bytes(body)

    def _check_complete(self, decoder: "_Decoder") -> None:
        if not decoder.is_complete:
            raise ServerError(
                ProblemType.CONTENT_CODING,
                f"the body ends in the middle of its {self._coding} stream",
            )

    def _count(self, num_bytes: int) -> None:
        """Check the limits after more bytes for the application."""
        self._size += num_bytes
        if self._size > self._limit:
            raise self._too_large(" after decompression")
        is_large = self._size > _FREE_BYTES
        if is_large and self.is_compressed and self._size > self._max_ratio * self._received:
            raise limit_error(
                ProblemType.TOO_LARGE,
                f"the body decompresses to more than {self._max_ratio:g} times its size; send it "
                "without compression",
                "max_compression_ratio",
                self._max_ratio,
                headers={"Connection": "close"},
            )
        beyond = self._size - _SMALL_BYTES
        if beyond > self._taken:
            self._memory.take(beyond - self._taken)
            self._taken = beyond

    def _too_large(self, when: str) -> ServerError:
        return limit_error(
            ProblemType.TOO_LARGE,
            f"the body exceeds {self._limit:,} bytes{when}; export the model on the meta device, "
            "which leaves the weights out, or raise the limit",
            "max_body_bytes",
            self._limit,
            headers={"Connection": "close"},
        )


class _Decoder:
    """Decompresses one or several concatenated streams in pieces of bounded size.

    Args:
        make: makes the decompressor of one stream.
        slice_bytes: compressed bytes to process at once.
    """

    def __init__(self, make: Callable[[], Any], slice_bytes: int) -> None:
        self._make = make
        self._slice_bytes = slice_bytes
        self._stream: Any = None
        self._num_streams = 0

    @property
    def is_complete(self) -> bool:
        """True if the body may end here."""
        return self._stream is None or self._stream.eof

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decompress more bytes."""
        for start in range(0, len(data), self._slice_bytes):
            rest = data[start : start + self._slice_bytes]
            while rest:
                if self.is_complete:
                    self._stream = self._make()
                    self._num_streams += 1
                    if self._num_streams > _MAX_STREAMS:
                        raise ServerError(
                            ProblemType.CONTENT_CODING,
                            f"the body has more than {_MAX_STREAMS} compressed streams",
                            headers={"Connection": "close"},
                        )
                yield self._stream.decompress(rest)
                rest = self._stream.unused_data if self._stream.eof else b""


def _decoder(coding: str) -> _Decoder:
    if coding in ("gzip", "x-gzip"):
        return _Decoder(lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), _GZIP_SLICE)
    if coding == "zstd":
        context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return _Decoder(context.decompressobj, _ZSTD_SLICE)
    raise ServerError(
        ProblemType.CONTENT_CODING,
        f"unknown Content-Encoding {coding!r}; use gzip, zstd or identity",
        headers={"Accept-Encoding": "gzip, zstd"},
    )
