"""Around every request: an id, a line in the log, and a limit on the body."""

import re
import time
from uuid import uuid4

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autoshard_server.problems import (
    INTERNAL,
    PROBLEM_MEDIA_TYPE,
    TOO_LARGE,
    ServerError,
    problem_of,
)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_log = structlog.get_logger("autoshard_server.access")


class RequestLog:
    """Gives each request an id, or takes over the caller's, and logs what became of it.

    An exception that nobody expected is logged here, and answered as a problem.
    The id is in the answer's `X-Request-ID` and in every log line of the request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                _log.info("client_gone")
            except Exception as error:
                _log.exception("request_failed")
                if status:
                    # The answer is under way already: only breaking it off tells the truth.
                    raise
                answer = JSONResponse(
                    problem_of(error), INTERNAL.status, media_type=PROBLEM_MEDIA_TYPE
                )
                await answer(scope, receive, send_with_id)
            finally:
                _log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=int(status),
                    seconds=round(time.monotonic() - started, 4),
                )


class BodyLimit:
    """Refuses bodies over a limit: before reading where the length is announced."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        length = int(announced) if announced.isdecimal() else 0
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            if length > self._limit:
                raise self._too_large()
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> ServerError:
        return ServerError(
            TOO_LARGE,
            f"the body exceeds {self._limit:,} bytes; export the model on the meta device, "
            "which leaves the weights out, or raise AUTOSHARD_MAX_BODY_BYTES",
            headers={"Connection": "close"},
            extensions={"limit": self._limit},
        )
