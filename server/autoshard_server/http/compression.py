"""Compressed request bodies: decompressed as they arrive, with limits before and after."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autoshard_server.problems import ProblemType, ServerError, limit_error

_GZIP_SLICE = 4096
"""Bytes decompressed at once: a byte decompresses to at most 1032, so the result to 4 MiB."""

_ZSTD_SLICE = 256
"""The same for zstd: four bytes may decompress to 128 KiB, so the result to 8 MiB."""

_ZSTD_WINDOW = 1 << 23
"""Largest window of a frame, in bytes; RFC 8878 requires decoders to support no more."""


class BodyLimit:
    """Refuses bodies over a limit, before reading if Content-Length exceeds it.

    Bodies with a Content-Encoding of gzip or zstd are decompressed, and the limit applies to the
    compressed and the decompressed bytes.

    Args:
        app: the wrapped application.
        limit: bytes.
    """

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, Headers(scope=scope), self._limit)
        if body.is_compressed:
            headers = MutableHeaders(raw=list(scope["headers"]))
            # The application gets the decompressed body.
            for name in ("content-encoding", "content-length"):
                if name in headers:
                    del headers[name]
            scope["headers"] = headers.raw
        await self._app(scope, body.receive, send)


class _Body:
    def __init__(self, receive: Receive, headers: Headers, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._coding = headers.get("content-encoding", "identity").strip().lower()
        self._decoder: _Decoder | None = None
        length = headers.get("content-length", "")
        self._announced = int(length) if length.isdecimal() else 0
        self._received = self._decompressed = 0

    @property
    def is_compressed(self) -> bool:
        return self._coding not in ("", "identity")

    async def receive(self) -> Message:
        if self._announced > self._limit:
            raise self._too_large("")
        if self.is_compressed and self._decoder is None:
            self._decoder = _decoder(self._coding)
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        data = message.get("body", b"")
        self._received += len(data)
        if self._received > self._limit:
            raise self._too_large("")
        if self._decoder is None:
            return message
        more = message.get("more_body", False)
        return {**message, "body": self._decode(self._decoder, data, more=more)}

    def _decode(self, decoder: "_Decoder", data: bytes, *, more: bool) -> bytes:
        body = bytearray()
        try:
            for piece in decoder.feed(data):
                body += piece
                self._decompressed += len(piece)
                if self._decompressed > self._limit:
                    raise self._too_large(" after decompression")
        except (zlib.error, zstandard.ZstdError) as error:
            detail = f"the body is not {self._coding}: {error}"
            raise ServerError(ProblemType.CONTENT_CODING, detail) from None
        if not more and not decoder.is_complete:
            raise ServerError(
                ProblemType.CONTENT_CODING,
                f"the body ends in the middle of its {self._coding} stream",
            )
        return bytes(body)

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
