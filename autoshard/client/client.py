"""The clients: a model and a mesh in, a plan out."""

import inspect
import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, get_args
from urllib.parse import urlsplit

from autoshard.client.api_key import find_api_key
from autoshard.client.carriers import Awaiting, Blocking, Carrier
from autoshard.client.effects import Conversation
from autoshard.client.link import Link
from autoshard.client.local import Local
from autoshard.client.offline import OfflinePlans
from autoshard.client.remote import Remote
from autoshard.client.retries import Retry
from autoshard.client.talk import Talk

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Carrier)

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_log = logging.getLogger(__name__)


def _blocking(
    method: Callable[Concatenate[Talk, P], Conversation[T]],
) -> "Callable[Concatenate[Client, P], T]":
    """A conversation as a method that blocks."""

    @wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        conversation: Conversation[T] = getattr(self._talk, method.__name__)(*args, **kwargs)
        return self._carrier.run(conversation)

    return _described(call, method)


def _awaiting(
    method: Callable[Concatenate[Talk, P], Conversation[T]],
) -> "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]":
    """A conversation as a coroutine."""

    @wraps(method)
    async def call(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        conversation: Conversation[T] = getattr(self._talk, method.__name__)(*args, **kwargs)
        return await self._carrier.run(conversation)

    return _described(call, method)


def _described(call: T, method: Callable[..., Any]) -> T:
    """A method with the signature of its conversation, returning what that returns."""
    signature = inspect.signature(method)
    *_, returned = get_args(signature.return_annotation)
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


class _Base(Generic[C]):
    """Whom a client talks to, and who carries that out."""

    _make_carrier: type[C]

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        api_key: str | Literal[False] | None = None,
        retry: Retry | None = None,
        cache: bool | str | Path = True,
        fallback: Literal["local"] | None = None,
    ) -> None:
        kept = _kept(cache)
        link = Link(url, retry or Retry())
        self._talk: Talk = Remote(link, kept, Local(kept) if fallback == "local" else None)
        self._carrier: C = self._make_carrier(url, timeout, _headers(url, api_key))

    @classmethod
    def local(cls, *, cache: bool | str | Path = True) -> Self:
        """A client that needs no service: plans are made in this process.

        What the service would refuse raises the library's own error here, such as `MeshError`.

        Args:
            cache: as of the client; where it is False, solved blocks are not kept either.
        """
        made = cls("http://localhost", cache=cache)
        made._talk = Local(_kept(cache), blocks=cache is not False)
        return made


class Client(_Base[Blocking]):
    """Talks to a planning service; a context manager. Safe to share between threads.

    Args:
        url: of the service, such as http://127.0.0.1:8000.
        timeout: seconds that a single request may take; planning may take longer.
        api_key: AUTOSHARD_API_KEY, the file that AUTOSHARD_API_KEY_FILE names, or `api-key` in
            the user's folder of settings, if left out; none is sent if False.
        retry: how patient to be when the service does not answer, or is too busy.
        cache: whether plans are kept on this machine for when the service is down, or the
            folder to keep them in; AUTOSHARD_CACHE, or the user's cache folder, if True.
        fallback: `local` makes plans in this process where the service is not there, and no
            plan is kept.

    Raises:
        OptionError: the API key cannot be read.
    """

    _make_carrier = Blocking

    plan = _blocking(Talk.plan)
    request_plan = _blocking(Talk.request_plan)
    search = _blocking(Talk.search)
    request_search = _blocking(Talk.request_search)
    validate = _blocking(Talk.validate)
    coverage = _blocking(Talk.coverage)
    get_plan = _blocking(Talk.get_plan)
    get_job = _blocking(Talk.get_job)
    wait_for_job = _blocking(Talk.wait_for_job)
    wait_for_search = _blocking(Talk.wait_for_search)
    cancel = _blocking(Talk.cancel)
    explain = _blocking(Talk.explain)
    compare = _blocking(Talk.compare)
    export = _blocking(Talk.export)
    list_plans = _blocking(Talk.list_plans)
    list_jobs = _blocking(Talk.list_jobs)
    list_topologies = _blocking(Talk.list_topologies)
    get_topology = _blocking(Talk.get_topology)
    put_topology = _blocking(Talk.put_topology)
    delete_topology = _blocking(Talk.delete_topology)
    health = _blocking(Talk.health)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._carrier.close()


class AsyncClient(_Base[Awaiting]):
    """As `Client`, with coroutines; an asynchronous context manager."""

    _make_carrier = Awaiting

    plan = _awaiting(Talk.plan)
    request_plan = _awaiting(Talk.request_plan)
    search = _awaiting(Talk.search)
    request_search = _awaiting(Talk.request_search)
    validate = _awaiting(Talk.validate)
    coverage = _awaiting(Talk.coverage)
    get_plan = _awaiting(Talk.get_plan)
    get_job = _awaiting(Talk.get_job)
    wait_for_job = _awaiting(Talk.wait_for_job)
    wait_for_search = _awaiting(Talk.wait_for_search)
    cancel = _awaiting(Talk.cancel)
    explain = _awaiting(Talk.explain)
    compare = _awaiting(Talk.compare)
    export = _awaiting(Talk.export)
    list_plans = _awaiting(Talk.list_plans)
    list_jobs = _awaiting(Talk.list_jobs)
    list_topologies = _awaiting(Talk.list_topologies)
    get_topology = _awaiting(Talk.get_topology)
    put_topology = _awaiting(Talk.put_topology)
    delete_topology = _awaiting(Talk.delete_topology)
    health = _awaiting(Talk.health)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._carrier.close()


def _kept(cache: bool | str | Path) -> OfflinePlans | None:  # noqa: FBT001  as callers give it
    if cache is False:
        return None
    return OfflinePlans(None if cache is True else cache)


def _headers(url: str, api_key: str | Literal[False] | None) -> dict[str, str]:
    headers = {"User-Agent": f"autoshard/{version('autoshard')}"}
    key = None if api_key is False else find_api_key(api_key)
    if key is None:
        return headers
    address = urlsplit(url)
    if address.scheme == "http" and address.hostname not in _LOOPBACK:
        _log.warning("the API key travels unencrypted to %s; use https", address.hostname)
    return headers | {"Authorization": f"Bearer {key}"}
