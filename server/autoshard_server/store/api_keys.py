"""Keys with which callers show who they are; of the secret only a digest is kept."""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, RowMapping, insert, select, update

from autoshard_server.store.tables import api_keys as keys
from autoshard_solver_cache import reader

_PREFIX = "autoshard"
_ID_BYTES = 8
_SECRET_BYTES = 32
_NOBODY = "0" * 64


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key.

    Attributes:
        id: 16 hex digits; may be logged.
        name: for people: whose it is.
        scopes: what it allows.
        created_at: seconds since 1970.
        expires_at: from when on it counts no more.
        revoked_at: since when it counts no more.
    """

    id: str
    name: str
    scopes: frozenset[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def is_live(self, now: float) -> bool:
        """Whether the key counts at a time."""
        expired = self.expires_at is not None and now >= self.expires_at
        return self.revoked_at is None and not expired


class ApiKeyStore:
    """Keys in the service's database.

    A token is `autoshard_ID_SECRET`. The secret has 256 random bits, so one round of SHA-256
    is enough to keep it.

    Args:
        engine: of a migrated database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = reader(engine)

    def create(
        self, name: str, scopes: Collection[str], *, expires_at: float | None = None
    ) -> tuple[ApiKey, str]:
        """A new key, and its token, which cannot be had again."""
        with self._engine.begin() as connection:
            return _insert(connection, name, scopes, expires_at)

    def authenticate(self, token: str) -> ApiKey | None:
        """The live key that a token shows, or None."""
        prefix, _, rest = token.partition("_")
        key_id, _, secret = rest.partition("_")
        with self._reader.begin() as connection:
            row = connection.execute(select(keys).where(keys.c.id == key_id)).mappings().first()
        expected = _NOBODY if row is None else row["secret_sha256"]
        # Compared where there is no such key, too: the time says nothing.
        if not hmac.compare_digest(_digest(secret), expected) or row is None or prefix != _PREFIX:
            return None
        found = _key(row)
        return found if found.is_live(time.time()) else None

    def list(self) -> "list[ApiKey]":
        """All keys, also those that count no more, oldest first."""
        query = select(keys).order_by(keys.c.created_at, keys.c.id)
        with self._reader.begin() as connection:
            return [_key(row) for row in connection.execute(query).mappings()]

    def revoke(self, key_id: str) -> bool:
        """Let a key count no more, at once; False where there is none that does."""
        where = (keys.c.id == key_id) & keys.c.revoked_at.is_(None)
        return self._update(where, revoked_at=time.time())

    def rotate(self, key_id: str, *, grace: float) -> tuple[ApiKey, str] | None:
        """A new key like a live one, which counts for so many more seconds; None without one.

        The new one expires when the old one would have.
        """
        now = time.time()
        same = keys.c.id == key_id
        with self._engine.begin() as connection:
            row = connection.execute(select(keys).where(same)).mappings().first()
            if row is None or not _key(row).is_live(now):
                return None
            old = _key(row)
            last = now + grace if old.expires_at is None else min(now + grace, old.expires_at)
            connection.execute(update(keys).where(same).values(expires_at=last))
            return _insert(connection, old.name, old.scopes, old.expires_at)

    def _update(self, where: ColumnElement[bool], **values: Any) -> bool:
        with self._engine.begin() as connection:
            return connection.execute(update(keys).where(where).values(values)).rowcount == 1


def _insert(
    connection: Connection, name: str, scopes: Collection[str], expires_at: float | None
) -> tuple[ApiKey, str]:
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    made = ApiKey(
        secrets.token_hex(_ID_BYTES), name, frozenset(scopes), time.time(), expires_at, None
    )
    values = {
        "id": made.id,
        "name": name,
        "secret_sha256": _digest(secret),
        "scopes": json.dumps(sorted(made.scopes)),
        "created_at": made.created_at,
        "expires_at": expires_at,
    }
    connection.execute(insert(keys).values(values))
    return made, f"{_PREFIX}_{made.id}_{secret}"


def _key(row: RowMapping) -> ApiKey:
    return ApiKey(
        id=row["id"],
        name=row["name"],
        scopes=frozenset(json.loads(row["scopes"])),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
