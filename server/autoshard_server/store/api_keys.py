"""API keys; only a digest of each secret is stored."""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock

from sqlalchemy import Connection, Engine, RowMapping, bindparam, insert, select, update

from autoshard.errors import InputError
from autoshard_server.projects import DEFAULT_PROJECT
from autoshard_server.store.audit import AuditAction, insert_event
from autoshard_server.store.tables import api_keys as keys
from autoshard_solver_cache import StoreUnavailableError, lock, reader

_PREFIX = "autoshard"
_ID_BYTES = 8
_SECRET_BYTES = 32
_NO_DIGEST = "0" * 64

_MAX_VALID = 2
"""Valid keys of a name in a project, so that one can replace the other."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key, without its secret.

    Attributes:
        id: 16 hex digits; may be logged.
        name: of its owner.
        scopes: permissions.
        created_at: seconds since 1970.
        expires_at: time from which it is invalid; None for no expiry.
        revoked_at: time at which it was revoked; None if it was not.
        project: to which its owner's resources belong.
        last_used_at: of the last request, to the minute; None if there was none.
    """

    id: str
    name: str
    scopes: frozenset[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    project: str = DEFAULT_PROJECT
    last_used_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """True if the key is neither revoked nor expired at the time `now`."""
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
        self._uses: dict[str, float] = {}
        self._lock = Lock()

    def create(
        self,
        name: str,
        scopes: Collection[str],
        *,
        project: str = DEFAULT_PROJECT,
        expires_at: float | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key; return it with its token, which is not stored.

        Raises:
            InputError: the name has as many valid keys as it may have.
        """
        with self._engine.begin() as connection:
            _check_number(connection, name, project)
            return _insert(connection, name, scopes, project, expires_at)

    def authenticate(self, token: str) -> ApiKey | None:
        """The valid key of a token, or None."""
        prefix, _, rest = token.partition("_")
        key_id, _, secret = rest.partition("_")
        with self._reader.begin() as connection:
            row = connection.execute(select(keys).where(keys.c.id == key_id)).mappings().first()
        expected = _NO_DIGEST if row is None else row["secret_sha256"]
        # Compared also if there is no such key, so that the time does not reveal it.
        if not hmac.compare_digest(_digest(secret), expected) or row is None or prefix != _PREFIX:
            return None
        found, now = _key(row), time.time()
        if not found.is_valid(now):
            return None
        with self._lock:
            self._uses[found.id] = now
        return found

    def write_uses(self) -> None:
        """Write when keys were used since the last call.

        Not when they are used: a request that only reads works without writing to the database.

        Raises:
            StoreUnavailableError: it cannot be written; the next call tries again.
        """
        with self._lock:
            uses, self._uses = self._uses, {}
        if not uses:
            return
        newer = keys.c.last_used_at.is_(None) | (keys.c.last_used_at < bindparam("at"))
        statement = update(keys).where(keys.c.id == bindparam("key"), newer)
        rows = [{"key": key, "at": at} for key, at in sorted(uses.items())]
        try:
            with self._engine.begin() as connection:
                connection.execute(statement.values(last_used_at=bindparam("at")), rows)
        except StoreUnavailableError:
            with self._lock:
                self._uses = {**uses, **self._uses}
            raise

    def list(self) -> "list[ApiKey]":
        """All keys, also invalid ones, oldest first."""
        query = select(keys).order_by(keys.c.created_at, keys.c.id)
        with self._reader.begin() as connection:
            return [_key(row) for row in connection.execute(query).mappings()]

    def revoke(self, key_id: str) -> bool:
        """Revoke a key; False if there is none, or it was revoked before."""
        where = (keys.c.id == key_id) & keys.c.revoked_at.is_(None)
        statement = update(keys).where(where).values(revoked_at=time.time())
        with self._engine.begin() as connection:
            project = connection.execute(statement.returning(keys.c.project)).scalar_one_or_none()
            if project is None:
                return False
            insert_event(connection, project, AuditAction.DELETE, f"keys/{key_id}")
            return True

    def rotate(self, key_id: str, *, grace: float) -> tuple[ApiKey, str] | None:
        """Replace a valid key by a new one of the same name, project, scopes and expiry.

        Args:
            key_id: of the old key.
            grace: seconds for which the old key stays valid.

        Returns:
            the new key and its token; None if there is no such valid key.

        Raises:
            InputError: the name has as many valid keys as it may have.
        """
        now = time.time()
        same = keys.c.id == key_id
        with self._engine.begin() as connection:
            row = connection.execute(select(keys).where(same)).mappings().first()
            if row is None or not _key(row).is_valid(now):
                return None
            old = _key(row)
            _check_number(connection, old.name, old.project)
            last = now + grace if old.expires_at is None else min(now + grace, old.expires_at)
            connection.execute(update(keys).where(same).values(expires_at=last))
            insert_event(connection, old.project, AuditAction.REPLACE, f"keys/{key_id}")
            return _insert(connection, old.name, old.scopes, old.project, old.expires_at)


def _check_number(connection: Connection, name: str, project: str) -> None:
    """Check that a name may have another key, in the transaction that inserts it.

    Raises:
        InputError: it has two that are valid.
    """
    lock(connection, "autoshard keys")
    same = select(keys).where(keys.c.name == name, keys.c.project == project)
    found = map(_key, connection.execute(same).mappings())
    valid = sorted(key.id for key in found if key.is_valid(time.time()))
    if len(valid) >= _MAX_VALID:
        raise InputError(
            f"{name!r} of the project {project!r} has the keys {' and '.join(valid)}; revoke one "
            "before making another"
        )


def _insert(
    connection: Connection,
    name: str,
    scopes: Collection[str],
    project: str,
    expires_at: float | None,
) -> tuple[ApiKey, str]:
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    made = ApiKey(
        secrets.token_hex(_ID_BYTES),
        name,
        frozenset(scopes),
        time.time(),
        expires_at,
        None,
        project,
    )
    statement = insert(keys).values(
        id=made.id,
        name=name,
        secret_sha256=_digest(secret),
        scopes=json.dumps(sorted(made.scopes)),
        created_at=made.created_at,
        expires_at=expires_at,
        project=project,
    )
    connection.execute(statement)
    insert_event(connection, project, AuditAction.CREATE, f"keys/{made.id}")
    return made, f"{_PREFIX}_{made.id}_{secret}"


def _key(row: RowMapping) -> ApiKey:
    columns = {name: row[name] for name in ApiKey.__slots__}
    return ApiKey(**{**columns, "scopes": frozenset(json.loads(row["scopes"]))})


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
