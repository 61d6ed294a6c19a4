"""Idempotency keys, and the jobs of their requests."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Engine, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoshard_server.callers import Caller
from autoshard_server.problems import ProblemType, limit_error
from autoshard_server.projects import DEFAULT_PROJECT
from autoshard_server.store.expiry import delete_expired
from autoshard_server.store.quotas import has_at_least
from autoshard_server.store.tables import idempotency_keys as keys
from autoshard_solver_cache import never, reader

LIFETIME = 24 * 3600.0
"""Seconds for which a key is stored."""

MAX_KEYS = 100_000
"""Largest number of keys of callers of one name."""

_NO_ANSWER = "{}"


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    """The request that a key identifies.

    Attributes:
        body_sha256: digest of the request; with another digest, the key is refused.
        job_id: job of the request; None before it is submitted, or if there is none.
    """

    body_sha256: str
    job_id: str | None = None


class IdempotencyStore:
    """Idempotency keys of callers in the service's database.

    Args:
        engine: of a migrated database.
        lifetime: seconds for which a key is stored.
        most: largest number of keys of callers of one name.
    """

    def __init__(self, engine: Engine, *, lifetime: float = LIFETIME, most: int = MAX_KEYS) -> None:
        self._engine = engine
        self._reader = reader(engine)
        self._lifetime = lifetime
        self._most = most

    def find(self, caller: Caller, key: str) -> IdempotencyRecord | None:
        """The request of a caller's key, or None for a new or expired key."""
        query = select(keys.c.body_sha256, keys.c.answer).where(_is(caller, key), ~self._expired())
        with self._reader.begin() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        return IdempotencyRecord(row.body_sha256, json.loads(row.answer).get("job"))

    def reserve(self, caller: Caller, key: str, body_sha256: str) -> IdempotencyRecord:
        """Reserve a key for a request; the first of several concurrent requests gets it.

        Args:
            caller: who sent the key; callers of other names or projects have other keys.
            key: the Idempotency-Key.
            body_sha256: digest of the request, 64 hex digits.

        Returns:
            the request that has the key now.

        Raises:
            ServerError: TOO_MANY_JOBS, if the caller has too many keys.
        """
        statement = insert(keys).values(
            caller=caller.name or "",
            key_sha256=_digest(caller, key),
            body_sha256=body_sha256,
            answer=_NO_ANSWER,
            created_at=time.time(),
        )
        while True:
            try:
                with self._engine.begin() as connection:
                    connection.execute(delete(keys).where(_is(caller, key), self._expired()))
                    self._check_number(connection, caller)
                    connection.execute(statement)
            except IntegrityError:
                found = self.find(caller, key)
                if found is None:
                    # It expired between the two transactions.
                    continue
                return found
            return IdempotencyRecord(body_sha256)

    def set_job(self, caller: Caller, key: str, body_sha256: str, job_id: str) -> None:
        """Store the job of the request that reserved a key, unless it has one."""
        unanswered = (keys.c.body_sha256 == body_sha256) & (keys.c.answer == _NO_ANSWER)
        statement = update(keys).where(_is(caller, key), unanswered)
        with self._engine.begin() as connection:
            connection.execute(statement.values(answer=json.dumps({"job": job_id})))

    def purge(self, *, is_over: Callable[[], bool] = never) -> int:
        """Delete expired keys, in batches; return their number."""
        before = time.time() - self._lifetime
        return delete_expired(self._engine, keys, keys.c.created_at, before, is_over=is_over)

    def _check_number(self, connection: Connection, caller: Caller) -> None:
        of_caller = select(keys.c.caller).where(keys.c.caller == (caller.name or ""))
        if has_at_least(connection, of_caller, self._most):
            raise limit_error(
                ProblemType.TOO_MANY_JOBS,
                f"your key has sent {self._most:,} Idempotency-Keys within {LIFETIME / 3600:g} "
                "hours; retry later, or send none",
                "max_project_records",
                self._most,
                headers={"Retry-After": "600"},
            )

    def _expired(self) -> ColumnElement[bool]:
        return keys.c.created_at < time.time() - self._lifetime


def _is(caller: Caller, key: str) -> ColumnElement[bool]:
    return (keys.c.caller == (caller.name or "")) & (keys.c.key_sha256 == _digest(caller, key))


def _digest(caller: Caller, key: str) -> str:
    """Digest of a key within its project; keys are printable, so that they have no NUL."""
    of_project = key if caller.project == DEFAULT_PROJECT else f"{caller.project}\0{key}"
    return hashlib.sha256(of_project.encode()).hexdigest()
