"""Asking a service for something that takes work: with the graph where it must be, until done."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from httpx2 import codes

from autoshard.client.asked import AskedGraph
from autoshard.client.effects import Answer, Conversation, OnProgress, Send, work
from autoshard.client.following import Follower
from autoshard.client.link import Link, document_of, post, post_form, retry_after
from autoshard.client.packing import packed
from autoshard.client.results import JobStatus, read_job
from autoshard.errors import RequestRejectedError

PLANS = "/v1/plans"

NOT_THERE = frozenset({404, 405})
"""Statuses that say that there is no such thing, or no such route yet."""

_PATIENCE = 10
"""Seconds that the service may keep a request open, to save a round of asking."""

_MOST_LOSSES = 2
"""Times that a job may be lost by the service, and be asked for again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an order.

    Attributes:
        answer: of the service, to the order.
        job: that makes or made it; None where the answer has the result.
        cached: whether the result was there before anybody asked this time.
    """

    answer: Answer
    job: JobStatus | None
    cached: bool

    @property
    def document(self) -> Any:
        """The result as JSON; None where its job is not done."""
        return document_of(self.answer) if self.job is None else self.job.result


class Orders:
    """Orders about graphs at one service.

    Args:
        link: to the service.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stores_graphs = True
        self._unpacks = True

    def place(
        self,
        path: str,
        asked: AskedGraph,
        on_progress: OnProgress | None = None,
        *,
        more: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> Conversation[Outcome]:
        """Ask for something, and wait until it is made.

        Args:
            path: of the route.
            asked: what is asked, and about which graph.
            on_progress: told of what happens to the job.
            more: members of the request besides those of what is asked.
            wait: whether to wait for a job.

        Raises:
            RequestRejectedError: the service refused, or the job failed or was cancelled.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        document = {**asked.document, **(more or {})}
        # With somebody watching, come back at once so as to report progress.
        patience = _PATIENCE if wait and on_progress is None else 0
        losses = 0
        while True:
            answer = yield from self._send(path, asked, document, patience, waiting=wait)
            cached = answer.headers.get("Autoshard-Cache") == "hit"
            if answer.status != codes.ACCEPTED:
                return Outcome(answer, None, cached)
            job = read_job(document_of(answer))
            if not wait:
                return Outcome(answer, job, cached)
            follower = Follower(self._link, job, on_progress)
            try:
                job = yield from follower.until_done(retry_after(answer) or 0.0)
            except RequestRejectedError as error:
                if error.status not in NOT_THERE or losses == _MOST_LOSSES:
                    raise
            else:
                job.check()
                return Outcome(answer, job, cached)
            losses += 1
            # The service has lost its jobs, as one that keeps them in memory does: ask anew.
            _log.warning("the service no longer knows the job %s; asking again", job.id)

    def _send(
        self,
        path: str,
        asked: AskedGraph,
        document: Mapping[str, Any],
        patience: int,
        *,
        waiting: bool,
    ) -> Conversation[Answer]:
        """Send an order, and the graph if it is not known."""
        headers = {"Prefer": f"wait={patience}", "Idempotency-Key": uuid4().hex}
        if self._stores_graphs:
            named = {**document, "graph_sha256": asked.graph_sha256}
            order = post(path, named, headers=headers, patience=patience)
            try:
                return (yield from self._link.send(order, waiting=waiting))
            except RequestRejectedError as error:
                if error.status == codes.NOT_FOUND:
                    yield from self._upload(asked, waiting=waiting)
                    return (yield from self._link.send(order, waiting=waiting))
                if error.status != codes.UNSUPPORTED_MEDIA_TYPE or path != PLANS:
                    raise
            # A service of an earlier version, which takes graphs with the request only.
            self._stores_graphs = False
        form = {
            "graph": ("graph", asked.graph, "application/octet-stream"),
            "request": (None, json.dumps(document), "application/json"),
        }
        order = post_form(path, form, headers=headers, patience=patience)
        return (yield from self._link.send(order, waiting=waiting))

    def _upload(self, asked: AskedGraph, *, waiting: bool) -> Conversation[None]:
        """Store a graph under its digest, compressed where the service takes that."""
        path = f"/v1/graphs/{asked.graph_sha256}"
        plain = {"Content-Type": "application/octet-stream"}
        if self._unpacks:
            coding, body = yield from work(lambda: packed(asked.graph))
            coded = plain if coding == "identity" else {**plain, "Content-Encoding": coding}
            try:
                yield from self._link.send(Send("PUT", path, coded, body), waiting=waiting)
            except RequestRejectedError as error:
                if error.status != codes.UNSUPPORTED_MEDIA_TYPE or coded is plain:
                    raise
                self._unpacks = False
            else:
                return
        yield from self._link.send(Send("PUT", path, plain, asked.graph), waiting=waiting)
