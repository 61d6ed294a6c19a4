"""Commands for stored data: `autoshard cache` and `autoshard keys`."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.base.extras import from_extra
from autoshard.base.files import check_is_file, write_file
from autoshard.base.quantities import parse_bytes
from autoshard.cli import options
from autoshard.cli.rendering.numbers import duration
from autoshard.cli.rendering.output import check_output, console, errors, marked, print_output
from autoshard.errors import InputError
from autoshard.report.tables import Column, Report, Table, Unit
from autoshard_solver_cache import (
    Cache,
    CacheFileError,
    EntryInfo,
    FolderCache,
    NamespaceError,
    export_entries,
    import_entries,
    verify_entries,
)

if TYPE_CHECKING:
    from autoshard_server.store.api_keys import ApiKey, ApiKeyStore

cache = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Inspect and manage the cache of plans and solved blocks: the folder of `autoshard plan`, "
    "or the database of a service (--store).",
)
keys = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make, list and revoke the API keys of a service, in its database.",
)

_DAY = 86400.0
_MAX_NAME = 64

Store = Annotated[
    str | None,
    typer.Option(
        "--store", help="Database of a service, as a SQLAlchemy URL, instead of a folder."
    ),
]
KeyStore = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Database of the service, as a SQLAlchemy URL; default: AUTOSHARD_STORE_URL, or the "
        "service's default.",
    ),
]
KeyId = Annotated[str, typer.Argument(help="Id shown by `list`; not the secret.")]
Namespace = Annotated[str, typer.Argument(help="Such as plans or blocks; see `ls`.")]
Namespaces = Annotated[
    list[str] | None,
    typer.Option("--namespace", "-n", help="Only these; default: all. Repeatable."),
]


@cache.command("ls")
@options.expand_groups
def list_entries(
    namespace: Annotated[
        str | None, typer.Argument(help="List its entries; default: list the namespaces.")
    ] = None,
    *,
    cache: options.Cache = None,
    store: Store = None,
    output: options.OutputOptions,
) -> None:
    """List the namespaces of a cache, or the entries of one."""
    with _open_cache(cache, store) as opened:
        if namespace is None:
            print_output(Report.of(_namespaces(opened)), output.chosen)
        else:
            print_output(Report.of(_entries(opened.entries(namespace))), output.chosen)


@cache.command()
def show(
    namespace: Namespace,
    key: Annotated[str, typer.Argument(help="The entry, such as the id of a plan.")],
    *,
    cache: options.Cache = None,
    store: Store = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", callback=check_output, help="File for the entry's bytes."),
    ] = None,
) -> None:
    """Show the size and age of an entry; with --output, write its bytes to a file."""
    with _open_cache(cache, store) as opened:
        entry, body = opened.info(namespace, key), opened.read(namespace, key)
        if entry is None or body is None:
            raise InputError(f"there is no intact entry {key!r} in {namespace!r}; see `ls`")
        print_output(Report.of(_entries(iter([entry]))), "table")
        if output is not None:
            write_file(output, body)


@cache.command("gc")
def collect(
    *,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="Size limit, such as 500MB, or 0; the least recently used are dropped first."
        ),
    ] = None,
    max_days: Annotated[
        float | None,
        duration(help="Drop entries that were not used for this many days.", unit="days"),
    ] = None,
    cache: options.Cache = None,
    store: Store = None,
) -> None:
    """Drop the least recently used entries."""
    with _open_cache(cache, store) as opened:
        if max_bytes is None and max_days is None:
            raise InputError("nothing to drop: give --max-bytes, --max-days or both")
        age = None if max_days is None else max_days * _DAY
        limit = 0 if max_bytes == "0" else None if max_bytes is None else parse_bytes(max_bytes)
        dropped = opened.evict(max_bytes=limit, max_age=age)
    console.print(f"dropped {dropped} entries", highlight=False)


@cache.command()
def verify(
    *, namespace: Namespaces = None, cache: options.Cache = None, store: Store = None
) -> None:
    """Read every entry and drop those that are damaged; they are solved again when needed."""
    with _open_cache(cache, store) as opened:
        damaged = list(verify_entries(opened, namespace))
    for entry in damaged:
        errors.print(marked("damaged:", f"{entry.namespace}/{entry.key}"), soft_wrap=True)
    if damaged:
        raise typer.Exit(1)
    console.print("every entry is intact")


@cache.command("export")
def export_cache(
    file: Annotated[Path, typer.Argument(callback=check_output, help="A .tar file, or .tar.gz.")],
    *,
    namespace: Namespaces = None,
    cache: options.Cache = None,
    store: Store = None,
) -> None:
    """Write entries to a tar file of digests and bytes."""
    with _open_cache(cache, store) as opened:
        count = export_entries(opened, file, namespace)
    console.print(f"wrote {count} entries", highlight=False)


@cache.command("import")
def import_cache(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    *,
    cache: options.Cache = None,
    store: Store = None,
) -> None:
    """Add the entries of a tar file; each is checked, and existing entries stay.

    Import only from people whose plans you would use: the digests detect damage, not forgery.
    """
    check_is_file(file, InputError)
    with _open_cache(cache, store) as opened:
        found = import_entries(opened, file)
    for name in found.rejected:
        errors.print(marked("rejected:", name), soft_wrap=True)
    existing = f"{found.num_existing} already existed"
    console.print(f"added {found.num_added} entries, {existing}", highlight=False)
    if found.rejected:
        raise typer.Exit(1)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Owner of the key; limits are counted by name.")],
    *,
    project: Annotated[
        str,
        typer.Option(
            help="Project of the key: it sees and changes the plans, graphs, jobs and topologies "
            "of this project only. All projects can read the topologies of 'shared'."
        ),
    ] = "default",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope", "-s", help="read, plan, metrics or admin; default: plan. Repeatable."
        ),
    ] = None,
    days: Annotated[float | None, duration(help="Days until the key expires.", unit="days")] = None,
    store: KeyStore = None,
) -> None:
    """Make a key and print its secret, which is not stored and cannot be shown again.

    A name has at most two active keys in a project, so that one can replace the other. The keys of
    one project share its graphs, jobs and plans: give them to people who may see each other's.
    """
    with from_extra("server"):
        from autoshard_server.callers import Scope  # noqa: PLC0415  an extra
        from autoshard_server.projects import is_project_name  # noqa: PLC0415  an extra

    with _open_keys(store) as opened:
        scopes = scope or [Scope.PLAN.value]
        unknown = sorted(set(scopes) - {known.value for known in Scope})
        if unknown:
            raise InputError(f"unknown scope {unknown[0]!r}; choose from {', '.join(Scope)}")
        if not 1 <= len(name) <= _MAX_NAME:
            raise InputError(f"the name has {len(name)} characters; give 1 to {_MAX_NAME}")
        if not name.isprintable():
            raise InputError(
                f"the name {name!r} has characters that cannot be seen; leave them out"
            )
        if not is_project_name(project):
            raise InputError(
                f"the project {project!r} has no valid name; give up to 32 lower-case letters, "
                "digits and hyphens, such as 'vision-2'"
            )
        expires = None if days is None else time.time() + days * _DAY
        made = opened.create(name, scopes, project=project, expires_at=expires)
    key, token = made
    scopes_text = ", ".join(sorted(key.scopes))
    console.print(f"key {key.id}: {scopes_text} in project {key.project}", highlight=False)
    typer.echo(token)


@keys.command("list")
@options.expand_groups
def list_keys(*, store: KeyStore = None, output: options.OutputOptions) -> None:
    """List all keys, also revoked and expired ones, with their last use; secrets are not stored."""
    with _open_keys(store) as opened:
        found = opened.list()
    names = ("id", "project", "name", "scopes", "created", "last used", "state")
    table = Table("keys", "", tuple(Column(name) for name in names))
    now = time.time()
    for key in found:
        scopes = " ".join(sorted(key.scopes))
        used = "never" if key.last_used_at is None else _date(key.last_used_at)
        created, state = _date(key.created_at), _state(key, now)
        table.add(key.id, key.project, key.name, scopes, created, used, state)
    print_output(Report.of(table), output.chosen)


@keys.command()
def revoke(key: KeyId, *, store: KeyStore = None) -> None:
    """Revoke a key; running services notice within two seconds."""
    with _open_keys(store) as opened:
        if not opened.revoke(key):
            raise _no_active_key(key)
    console.print(f"revoked {key}", highlight=False)


@keys.command()
def rotate(
    key: KeyId,
    *,
    hours: Annotated[float, duration(help="Hours until the old key expires.", unit="hours")] = 24.0,
    store: KeyStore = None,
) -> None:
    """Replace a key by a new one with the same scopes; print the new secret."""
    with _open_keys(store) as opened:
        made = opened.rotate(key, grace=hours * 3600.0)
        if made is None:
            raise _no_active_key(key)
    console.print(f"key {made[0].id} replaces {key}", highlight=False)
    typer.echo(made[1])


@contextmanager
def _open_cache(folder: Path | None, store: str | None) -> Iterator[Cache]:
    """Open the folder or the database; its errors are reported as errors of the input."""
    if store is None:
        if folder is not None and folder.is_file():
            raise InputError(f"{folder} is a file, not the folder of a cache")
        with _as_input_error(CacheFileError, NamespaceError), closing(FolderCache(folder)) as c:
            yield c
        return
    with from_extra("server"):
        from autoshard_solver_cache import SolverCache, StoreUnavailableError  # noqa: PLC0415

    kinds = CacheFileError, StoreUnavailableError
    with _as_input_error(*kinds), closing(SolverCache(store)) as opened:
        yield opened


@contextmanager
def _open_keys(url: str | None) -> "Iterator[ApiKeyStore]":
    with from_extra("server"):
        from autoshard_server.environment import load_settings  # noqa: PLC0415  an extra
        from autoshard_server.store.database import Stores  # noqa: PLC0415  an extra
        from autoshard_solver_cache import StoreUnavailableError  # noqa: PLC0415  an extra

    with _as_input_error(StoreUnavailableError):
        stores = Stores(load_settings(store_url=url))
    with closing(stores):
        yield stores.api_keys


@contextmanager
def _as_input_error(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise InputError(str(error)) from error


def _no_active_key(key: str) -> InputError:
    return InputError(f"there is no active key {key!r}; see `autoshard keys list`")


def _state(key: "ApiKey", now: float) -> str:
    if key.revoked_at is not None:
        return f"revoked {_date(key.revoked_at)}"
    if not key.is_valid(now):
        return "expired"
    return "active" if key.expires_at is None else f"until {_date(key.expires_at)}"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _namespaces(cache: Cache) -> Table:
    columns = Column("entries", Unit.COUNT), Column("stored size", Unit.BYTES)
    table = Table("namespaces", "", (Column("namespace"), *columns))
    for namespace in cache.namespaces():
        stats = cache.stats(namespace)
        table.add(namespace, stats.num_entries, stats.nbytes)
    return table


def _entries(entries: Iterator[EntryInfo]) -> Table:
    sizes = Column("size", Unit.BYTES), Column("stored size", Unit.BYTES)
    times = Column("created", Unit.UNIX_TIME), Column("used", Unit.UNIX_TIME)
    table = Table("entries", "", (Column("key"), *sizes, *times))
    for e in entries:
        table.add(e.key, e.size, e.stored_size, e.created_at, e.used_at)
    return table
