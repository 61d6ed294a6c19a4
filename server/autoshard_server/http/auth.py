"""Who asks, and what they may do: API keys with scopes."""

import hashlib
import ipaddress
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio.to_thread
import structlog
from cachetools import TTLCache
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from autoshard_server.problems import FORBIDDEN, UNAUTHENTICATED, ServerError
from autoshard_server.settings import Settings
from autoshard_server.store import ApiKey, ApiKeyStore

_TRUST_SECONDS = 2.0
"""For how long a key that was looked up counts without looking again; a revoked one too."""

_MOST_TRUSTED = 10_000


class Scope(StrEnum):
    """What a key may allow."""

    READ = "read"
    """Plans, jobs, graphs and topologies that are there."""
    PLAN = "plan"
    """Asking for what takes work, and cancelling it; and reading."""
    METRICS = "metrics"
    """GET /metrics."""
    ADMIN = "admin"
    """Everything."""


_IMPLIED = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.PLAN: frozenset({Scope.PLAN, Scope.READ}),
    Scope.METRICS: frozenset({Scope.METRICS}),
    Scope.ADMIN: frozenset(Scope),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        name: of the key, which two keys share while one replaces the other; None where keys
            are not needed.
        scopes: what is allowed.
    """

    name: str | None
    scopes: frozenset[Scope]


ANYBODY = Caller(None, frozenset(Scope))
"""Whoever asks where keys are not needed."""


class Guard:
    """Tells callers by their keys.

    Args:
        keys: that were given out.
        settings: whether a key is needed.
    """

    def __init__(self, keys: ApiKeyStore, settings: Settings) -> None:
        self._keys = keys
        self._mode = settings.auth
        self._trusted: TTLCache[bytes, ApiKey] = TTLCache(_MOST_TRUSTED, _TRUST_SECONDS)
        self._lock = Lock()

    async def caller(self, request: Request, token: str | None) -> Caller:
        """Who asks.

        Raises:
            ServerError: UNAUTHENTICATED, where a key is needed and none that counts was sent;
                FORBIDDEN, where none is needed, but a page of another site asks.
        """
        if not self.is_needed(request):
            if self._mode == "auto":
                _refuse_other_sites(request)
            return ANYBODY
        if token is None:
            raise _unauthenticated("send 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(token.encode()).digest()
        with self._lock:
            key = self._trusted.get(digest)
        if key is None:
            key = await anyio.to_thread.run_sync(self._keys.authenticate, token)
            if key is None:
                raise _unauthenticated("the key is unknown, revoked or expired")
            with self._lock:
                self._trusted[digest] = key
        known = {scope.value for scope in Scope}
        scopes = (_IMPLIED[Scope(scope)] for scope in key.scopes if scope in known)
        return Caller(key.name, frozenset().union(*scopes))

    def is_needed(self, request: Request) -> bool:
        """Whether a key is needed: `auto` asks which address the caller has reached."""
        if self._mode == "auto":
            server = request.scope.get("server")
            return not is_loopback(server[0] if server else "")
        return self._mode == "required"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a socket in the file system is one."""
    if host == "localhost" or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse_other_sites(request: Request) -> None:
    """Keep out pages in a browser of this machine, and names that lead here (DNS rebinding).

    Raises:
        ServerError: FORBIDDEN.
    """
    server = request.scope.get("server")
    if server and server[0].startswith("/"):
        # No browser reaches a socket in the file system.
        return
    host, origin = request.headers.get("host"), request.headers.get("origin")
    for header, address in (("Host", host and f"//{host}"), ("Origin", origin)):
        if address and not is_loopback(_host_of(address)):
            raise ServerError(
                FORBIDDEN,
                f"the {header} {address.removeprefix('//')!r} is not this machine, and without "
                "keys only this machine may ask; start the service with --auth and send a key, "
                "or with --no-auth",
            )


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="apiKey",
    description="A key of `autoshard keys create`; not needed on loopback.",
)


def needs(scope: Scope) -> Callable[..., Coroutine[Any, Any, Caller]]:
    """A dependency: the caller, if a key allows what the scope stands for."""

    async def allowed(
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Caller:
        guard: Guard = request.app.state.guard
        token = None if credentials is None else credentials.credentials
        caller = await guard.caller(request, token)
        if caller.name is not None:
            structlog.contextvars.bind_contextvars(caller=caller.name)
        if scope not in caller.scopes:
            raise ServerError(
                FORBIDDEN,
                f"this needs the scope {scope.value!r}, and the key has "
                f"{sorted(s.value for s in caller.scopes)}",
                headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
            )
        return caller

    return allowed


def _unauthenticated(detail: str) -> ServerError:
    return ServerError(UNAUTHENTICATED, detail, headers={"WWW-Authenticate": "Bearer"})


Reader = Annotated[Caller, Depends(needs(Scope.READ))]
Planner = Annotated[Caller, Depends(needs(Scope.PLAN))]
Scraper = Annotated[Caller, Depends(needs(Scope.METRICS))]
