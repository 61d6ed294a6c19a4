"""Bodies of requests: decompressed as they arrive, within limits before and after."""

import zlib
from collections.abc import Iterator
from typing import Protocol

import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autoshard_server.problems import CODING, TOO_LARGE, ServerError

_ZSTD_SLICE = 256
"""Bytes fed at once: four of them may stand for 128 KiB, so this makes at most 8 MiB."""

_ZSTD_WINDOW = 1 << 23
"""Largest memory that a frame may ask for; RFC 8878 asks decoders for no more."""

_GZIP_STEP = 1 << 20

_GZIP = 16 + zlib.MAX_WBITS


class _Decoder(Protocol):
    def feed(self, data: bytes) -> Iterator[bytes]:
        """What these bytes make, in pieces of bounded size."""

    @property
    def is_over(self) -> bool:
        """Whether the body may end here."""


class BodyLimit:
    """Refuses bodies over a limit, before reading where the length is announced.

    Bodies with a Content-Encoding of gzip or zstd arrive decompressed, and the limit holds
    for what was sent and for what it makes.

    Args:
        app: behind it.
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
        if body.is_coded:
            headers = MutableHeaders(raw=list(scope["headers"]))
            # What follows sees the body as it was before it was coded.
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
        announced = headers.get("content-length", "")
        self._announced = int(announced) if announced.isdecimal() else 0
        self._sent = self._made = 0

    @property
    def is_coded(self) -> bool:
        return self._coding not in ("", "identity")

    async def receive(self) -> Message:
        if self._announced > self._limit:
            raise self._too_large("")
        if self.is_coded and self._decoder is None:
            self._decoder = _decoder(self._coding)
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        data = message.get("body", b"")
        self._sent += len(data)
        if self._sent > self._limit:
            raise self._too_large("")
        if self._decoder is None:
            return message
        more = message.get("more_body", False)
        return {**message, "body": self._decoded(self._decoder, data, more=more)}

    def _decoded(self, decoder: _Decoder, data: bytes, *, more: bool) -> bytes:
        made = bytearray()
        try:
            for piece in decoder.feed(data):
                made += piece
                self._made += len(piece)
                if self._made > self._limit:
                    raise self._too_large(" after decompression")
        except (zlib.error, zstandard.ZstdError) as error:
            raise ServerError(CODING, f"the body is not {self._coding}: {error}") from None
        if not more and not decoder.is_over:
            raise ServerError(CODING, f"the body ends in the middle of its {self._coding} stream")
        return bytes(made)

    def _too_large(self, when: str) -> ServerError:
        return ServerError(
            TOO_LARGE,
            f"the body exceeds {self._limit:,} bytes{when}; export the model on the meta device, "
            "which leaves the weights out, or raise AUTOSHARD_MAX_BODY_BYTES",
            headers={"Connection": "close"},
            extensions={"limit": self._limit, "limit_name": "AUTOSHARD_MAX_BODY_BYTES"},
        )


def _decoder(coding: str) -> _Decoder:
    if coding in ("gzip", "x-gzip"):
        return _Gzip()
    if coding == "zstd":
        return _Zstd()
    raise ServerError(
        CODING,
        f"the Content-Encoding {coding!r} is not known; send gzip, zstd or identity",
        headers={"Accept-Encoding": "gzip, zstd"},
    )


class _Gzip:
    """One or several members, one after the other."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP)
        self._begun = False

    @property
    def is_over(self) -> bool:
        return self._stream.eof or not self._begun

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream.eof:
                self._stream = zlib.decompressobj(_GZIP)
            self._begun = True
            yield self._stream.decompress(data, _GZIP_STEP)
            data = self._stream.unconsumed_tail or self._stream.unused_data


class _Zstd:
    """One or several frames, one after the other."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame = self._context.decompressobj()
        self._begun = False

    @property
    def is_over(self) -> bool:
        return self._frame.eof or not self._begun

    def feed(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _ZSTD_SLICE):
            rest = data[start : start + _ZSTD_SLICE]
            while rest:
                if self._frame.eof:
                    self._frame = self._context.decompressobj()
                self._begun = True
                yield self._frame.decompress(rest)
                rest = self._frame.unused_data if self._frame.eof else b""
