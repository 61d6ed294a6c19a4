"""Commands about API keys: who may ask a service, and for what."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from autoshard.cli.output import console, reported
from autoshard.errors import InputError

if TYPE_CHECKING:
    from autoshard_server.store import ApiKey, ApiKeyStore

app = typer.Typer(
    no_args_is_help=True,
    help="Make, list and revoke the API keys of a service, in its database.",
)

_LONGEST_NAME = 64
_LIVE = 2
_DAY = 86400.0

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Database of the service, as a SQLAlchemy URL; if left out, the one that "
        "AUTOSHARD_STORE_URL names, or the default one.",
    ),
]
KeyId = Annotated[str, typer.Argument(help="Of `list`; not the secret.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is; limits count by name.")],
    *,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", "-s", help="read, plan, metrics or admin; plan. Repeatable."),
    ] = None,
    days: Annotated[float | None, typer.Option(help="For how many days it counts.")] = None,
    store: Store = None,
) -> None:
    """Make a key and print its secret, which is not kept and cannot be shown again.

    A name has at most two keys that count, so that one can take over from the other.
    Keys of one service share its graphs, jobs and plans: give them to people who may see each
    other's.
    """
    from autoshard_server.http.auth import Scope  # noqa: PLC0415  the library works without it

    with _opened(store) as keys:
        scopes = scope or [Scope.PLAN.value]
        unknown = sorted(set(scopes) - {known.value for known in Scope})
        if unknown:
            raise InputError(f"there is no scope {unknown[0]!r}; choose of {', '.join(Scope)}")
        if not 1 <= len(name) <= _LONGEST_NAME:
            raise InputError(f"a name has 1 to {_LONGEST_NAME} characters")
        now = time.time()
        _expect_room(keys, name)
        expires = None if days is None else now + days * _DAY
        key, token = keys.create(name, scopes, expires_at=expires)
    console.print(f"key {key.id}: {', '.join(sorted(key.scopes))}", highlight=False)
    typer.echo(token)


@app.command("list")
def list_keys(*, store: Store = None) -> None:
    """Show all keys, also those that count no more; secrets are not kept."""
    with _opened(store) as keys:
        found = keys.list()
    table = Table(box=None)
    for column in ("id", "name", "scopes", "created", "state"):
        table.add_column(column)
    now = time.time()
    for key in found:
        scopes = " ".join(sorted(key.scopes))
        table.add_row(key.id, key.name, scopes, _date(key.created_at), _state(key, now))
    console.print(table)


@app.command()
def revoke(key: KeyId, *, store: Store = None) -> None:
    """Let a key count no more; running services notice within two seconds."""
    with _opened(store) as keys:
        if not keys.revoke(key):
            raise InputError(f"there is no key {key!r} that counts; see `autoshard keys list`")
    console.print(f"revoked {key}", highlight=False)


@app.command()
def rotate(
    key: KeyId,
    *,
    hours: Annotated[float, typer.Option(help="For how long the old key still counts.")] = 24.0,
    store: Store = None,
) -> None:
    """Make a key like another one, which counts for some hours more; print the new secret."""
    with _opened(store) as keys:
        _expect_room(keys, next((known.name for known in keys.list() if known.id == key), ""))
        made = keys.rotate(key, grace=hours * 3600.0)
        if made is None:
            raise InputError(f"there is no key {key!r} that counts; see `autoshard keys list`")
    console.print(f"key {made[0].id} takes over from {key}", highlight=False)
    typer.echo(made[1])


def _expect_room(keys: "ApiKeyStore", name: str) -> None:
    now = time.time()
    live = [key.id for key in keys.list() if key.name == name and key.is_live(now)]
    if len(live) >= _LIVE:
        raise InputError(
            f"{name!r} has the keys {' and '.join(live)}; revoke one before making another"
        )


@contextmanager
def _opened(url: str | None) -> "Iterator[ApiKeyStore]":
    from autoshard_server.settings import Settings  # noqa: PLC0415  as above
    from autoshard_server.stores import open_stores  # noqa: PLC0415  as above
    from autoshard_solver_cache import StoreUnavailableError  # noqa: PLC0415  as above

    with reported():
        try:
            stores = open_stores(Settings() if url is None else Settings(store_url=url))
        except StoreUnavailableError as error:
            raise InputError(str(error)) from None
        try:
            yield stores.api_keys
        finally:
            stores.close()


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _state(key: "ApiKey", now: float) -> str:
    if key.revoked_at is not None:
        return f"revoked {_date(key.revoked_at)}"
    if not key.is_live(now):
        return "expired"
    return "counts" if key.expires_at is None else f"until {_date(key.expires_at)}"
