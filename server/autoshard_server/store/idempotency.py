"""What was answered to requests that carried an Idempotency-Key."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Engine, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoshard_server.store.tables import idempotency_keys as keys
from autoshard_solver_cache import reader

LIFETIME = 24 * 3600.0
"""Seconds for which a key is remembered."""

_NONE_YET = "{}"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a key stands for.

    Attributes:
        body_sha256: digest of the request's body; another one is a misuse of the key.
        answer: what whoever answered first wrote down, such as the id of a job; empty before.
    """

    body_sha256: str
    answer: Mapping[str, Any]


class IdempotencyStore:
    """Keys of callers, each for so long.

    Args:
        engine: of a migrated database.
        lifetime: seconds.
    """

    def __init__(self, engine: Engine, *, lifetime: float = LIFETIME) -> None:
        self._engine = engine
        self._reader = reader(engine)
        self._lifetime = lifetime

    def find(self, caller: str, key: str) -> Reply | None:
        """What the key stands for, or None: new, or forgotten."""
        fresh = keys.c.created_at >= time.time() - self._lifetime
        query = select(keys.c.body_sha256, keys.c.answer).where(_is(caller, key), fresh)
        with self._reader.begin() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else Reply(row.body_sha256, json.loads(row.answer))

    def reserve(self, caller: str, key: str, body_sha256: str) -> Reply:
        """What the key stands for from now on: of several that ask at once, the first counts.

        Args:
            caller: whose key it is; the empty string where callers are not told apart.
            key: as it was sent.
            body_sha256: of the request, 64 hex digits.

        Returns:
            with an empty answer until `answer` has given one.
        """
        values = {
            "caller": caller,
            "key_sha256": _digest(key),
            "body_sha256": body_sha256,
            "answer": _NONE_YET,
            "created_at": time.time(),
        }
        stale = keys.c.created_at < time.time() - self._lifetime
        while True:
            try:
                with self._engine.begin() as connection:
                    connection.execute(delete(keys).where(_is(caller, key), stale))
                    connection.execute(insert(keys).values(values))
            except IntegrityError:
                found = self.find(caller, key)
                if found is None:
                    # It has come of age in this very moment.
                    continue
                return found
            return Reply(body_sha256, {})

    def answer(self, caller: str, key: str, body_sha256: str, answer: Mapping[str, Any]) -> None:
        """Write down what the request of a reserved key was answered; the first answer counts.

        Args:
            caller: whose key it is.
            key: as it was sent.
            body_sha256: of the request that reserved it.
            answer: JSON.
        """
        unanswered = (keys.c.body_sha256 == body_sha256) & (keys.c.answer == _NONE_YET)
        statement = update(keys).where(_is(caller, key), unanswered)
        with self._engine.begin() as connection:
            connection.execute(statement.values(answer=json.dumps(answer)))

    def purge(self) -> int:
        """Forget keys that are too old; how many there were."""
        old = keys.c.created_at < time.time() - self._lifetime
        with self._engine.begin() as connection:
            return connection.execute(delete(keys).where(old)).rowcount


def _is(caller: str, key: str) -> ColumnElement[bool]:
    return (keys.c.caller == caller) & (keys.c.key_sha256 == _digest(key))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
