"""Base class of both clients: construction, and results that are computed from plans."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self, TypeVar

from autoshard.base.arguments import Count, Seconds, check_methods
from autoshard.client.local import Local
from autoshard.client.remote import Remote
from autoshard.client.transport import Request, Retry, Transport
from autoshard.plan import Plan
from autoshard.requests.kept_plans import OfflinePlans
from autoshard.requests.this_process import ThisProcess

T = TypeVar("T")


@check_methods
class ClientBase:
    """Construction of both clients."""

    _transport_class: type[Transport]

    def __init__(
        self,
        url: str,
        *,
        timeout: Seconds = 30.0,
        api_key: str | Literal[False] | None = None,
        retry: Retry | None = None,
        cache: bool | str | Path = True,
        fallback: Literal["local"] | None = None,
    ) -> None:
        transport = self._transport_class(url, timeout, retry or Retry(), api_key)
        self._transport = transport
        local = Local(transport, ThisProcess(cache=cache)) if fallback == "local" else None
        self._backend: Local | Remote = Remote(transport, OfflinePlans.of(cache), local)

    @classmethod
    def local(cls, *, cache: bool | str | Path = True, num_workers: Count = 2) -> Self:
        """Make a client that works without a service: it runs requests in this process.

        It has no jobs: requests are waited for. Requests that a service would refuse raise the
        library's own errors, such as `MeshError`.

        Args:
            cache: store plans, solved blocks and found rules on this machine, or the folder to
                store them in; AUTOSHARD_CACHE, or the user's cache folder, if True.
            num_workers: processes that a mesh search plans with.
        """
        made = cls("http://localhost", api_key=False, cache=cache)
        here = ThisProcess(cache=cache, num_workers=num_workers)
        made._backend = Local(made._transport, here)
        return made

    async def _compute_from_plans(
        self,
        *plans: Plan | str,
        kind: type[T],
        make_request: Callable[..., Request],
        compute: Callable[..., T],
        waiting: bool = False,
    ) -> T:
        """Compute a result from plans: at the service if all are ids, else in this process.

        Args:
            *plans: ids, or plans.
            kind: type of the result; a `str` is the text of the response.
            make_request: makes the request to the service; its arguments are the ids.
            compute: computes the result in this process; its arguments are the plans.
            waiting: true if the service may need a job for it.
        """
        if isinstance(self._backend, Remote) and all(isinstance(plan, str) for plan in plans):
            return await self._backend.request(make_request(*plans), kind, waiting=waiting)
        found = [await self._backend.get_plan(p) if isinstance(p, str) else p for p in plans]
        return await self._transport.run(lambda: compute(*found))
