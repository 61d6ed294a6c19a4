"""Authentication and authorization: API keys with scopes."""

import hashlib
import ipaddress
from collections.abc import Callable, Coroutine
from threading import Lock
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import structlog
from cachetools import TTLCache
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from autoshard_server.callers import ANONYMOUS, Caller, Scope
from autoshard_server.http.parameters import (
    refuse_other_media_types,
    refuse_unknown_parameters,
)
from autoshard_server.http.throttle import Throttle
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.settings import Settings
from autoshard_server.store.api_keys import ApiKey, ApiKeyStore

_TTL = 2.0
"""Seconds for which a key is cached; a revoked key may be accepted for as long."""

_MAX_KEYS = 10_000
_MAX_LOOK_UPS = 4
"""Keys that are looked up in the database at once, so that strangers leave threads to others."""


_IMPLIED = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.PLAN: frozenset({Scope.PLAN, Scope.READ}),
    Scope.METRICS: frozenset({Scope.METRICS}),
    Scope.ADMIN: frozenset({Scope.ADMIN, Scope.PLAN, Scope.READ}),
}


class Authenticator:
    """Finds the caller of a request by its key.

    Args:
        keys: of the callers.
        settings: with the mode of authentication.
    """

    def __init__(self, keys: ApiKeyStore, settings: Settings) -> None:
        self._keys = keys
        self._mode = settings.auth
        self._origins = settings.allowed_origins
        self._recent: TTLCache[bytes, ApiKey] = TTLCache(_MAX_KEYS, _TTL)
        self._throttle = Throttle(settings.max_invalid_keys)
        self._look_ups = anyio.CapacityLimiter(_MAX_LOOK_UPS)
        self._lock = Lock()

    async def caller(self, request: Request, token: str | None) -> Caller:
        """The caller of a request.

        Raises:
            ServerError: UNAUTHENTICATED, if a key is required and no valid one was sent;
                FORBIDDEN, if none is required, but the request comes from another site's page;
                TOO_MANY_FAILURES.
        """
        if not self._is_required(request):
            if self._mode == "auto":
                _refuse_other_sites(request, self._origins)
            return ANONYMOUS
        if token is None:
            raise _unauthenticated("send 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(token.encode()).digest()
        with self._lock:
            key = self._recent.get(digest)
        if key is None:
            address = request.client.host if request.client else ""
            find = self._keys.authenticate
            key = await anyio.to_thread.run_sync(find, token, limiter=self._look_ups)
            if key is None:
                self._throttle.check(address)
                self._throttle.failed(address)
                raise _unauthenticated("the key is unknown, revoked or expired")
            with self._lock:
                self._recent[digest] = key
        known = {scope.value for scope in Scope}
        scopes = (_IMPLIED[Scope(scope)] for scope in key.scopes if scope in known)
        return Caller(key.name, frozenset().union(*scopes), key.project)

    def _is_required(self, request: Request) -> bool:
        """True if a key is required; in mode `auto`, that depends on the address it was sent to."""
        if self._mode == "auto":
            server = request.scope.get("server")
            return not is_loopback(server[0] if server else "")
        return self._mode == "required"


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address, such as a Unix socket."""
    if host == "localhost" or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse_other_sites(request: Request, allowed: list[str]) -> None:
    """Refuse requests from pages of other sites in a local browser, and DNS rebinding.

    Args:
        request: to a loopback address.
        allowed: origins of other sites whose pages may send requests.

    Raises:
        ServerError: FORBIDDEN.
    """
    server = request.scope.get("server")
    if server and server[0].startswith("/"):
        # No browser connects to a Unix socket.
        return
    host, origin = request.headers.get("host"), request.headers.get("origin")
    if origin in allowed:
        origin = None
    for header, address in (("Host", host and f"//{host}"), ("Origin", origin)):
        if address and not is_loopback(_host_of(address)):
            raise ServerError(
                ProblemType.FORBIDDEN,
                f"the {header} {address.removeprefix('//')!r} is not this machine, and without "
                "keys only this machine may send requests; start the service with --auth and send "
                "a key, or with --no-auth",
            )


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="apiKey",
    description="A key of `autoshard keys create`; not required on loopback.",
)


def _requires(scope: Scope) -> Callable[..., Coroutine[Any, Any, Caller]]:
    """A dependency: the caller, if its key has a scope."""

    async def allowed(
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Caller:
        authenticator: Authenticator = request.app.state.authenticator
        token = None if credentials is None else credentials.credentials
        caller = await authenticator.caller(request, token)
        named = {} if caller.name is None else {"caller": caller.name}
        structlog.contextvars.bind_contextvars(project=caller.project, **named)
        if scope not in caller.scopes:
            raise ServerError(
                ProblemType.FORBIDDEN,
                f"this requires the scope {scope.value!r}, and the key has "
                f"{sorted(s.value for s in caller.scopes)}",
                headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
            )
        refuse_unknown_parameters(request)
        refuse_other_media_types(request)
        return caller

    return allowed


def _unauthenticated(detail: str) -> ServerError:
    return ServerError(ProblemType.UNAUTHENTICATED, detail, headers={"WWW-Authenticate": "Bearer"})


Reader = Annotated[Caller, Depends(_requires(Scope.READ))]
Planner = Annotated[Caller, Depends(_requires(Scope.PLAN))]
Admin = Annotated[Caller, Depends(_requires(Scope.ADMIN))]
Scraper = Annotated[Caller, Depends(_requires(Scope.METRICS))]
