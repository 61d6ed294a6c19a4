"""Commands about the cache: what it holds, whether it is intact, and taking it along."""

import json as js
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from autoshard.cli import options
from autoshard.cli.output import console, errors, marked, reported
from autoshard.cli.render import format_bytes, titled_table
from autoshard.errors import InputError
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

app = typer.Typer(
    no_args_is_help=True,
    help="Look at and look after cached plans and solved blocks: those of `autoshard plan` in a "
    "folder, or those of a service in its database (--store).",
)

Store = Annotated[
    str | None,
    typer.Option(
        "--store", help="Database of a service, as a SQLAlchemy URL, instead of a folder."
    ),
]
Namespace = Annotated[str, typer.Argument(help="Such as plans or blocks; see `ls`.")]
Namespaces = Annotated[
    list[str] | None,
    typer.Option("--namespace", "-n", help="Only these; all if left out. Repeatable."),
]


@app.command("ls")
def list_entries(
    namespace: Annotated[
        str | None, typer.Argument(help="Show its entries; if left out, the namespaces.")
    ] = None,
    *,
    cache: options.Cache = None,
    store: Store = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Show what a cache holds."""
    with _opened(cache, store) as opened:
        if namespace is None:
            _print_namespaces(opened, json=json)
        else:
            _print_entries(opened.entries(namespace), json=json)


@app.command()
def show(
    namespace: Namespace,
    key: Annotated[str, typer.Argument(help="The entry, such as the id of a plan.")],
    *,
    cache: options.Cache = None,
    store: Store = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write its bytes.")
    ] = None,
) -> None:
    """Show what is known of an entry, and write its bytes to a file if asked."""
    with _opened(cache, store) as opened:
        entry, body = opened.info(namespace, key), opened.read(namespace, key)
        if entry is None or body is None:
            raise InputError(f"there is no intact entry {key!r} in {namespace!r}; see `ls`")
        _print_entries(iter([entry]), json=False)
        if output is not None:
            output.write_bytes(body)


@app.command("gc")
def collect(
    *,
    max_bytes: Annotated[
        int | None, typer.Option(help="Room for all entries; the least recently used go first.")
    ] = None,
    max_days: Annotated[
        float | None, typer.Option(help="Drop what nobody has used for so many days.")
    ] = None,
    cache: options.Cache = None,
    store: Store = None,
) -> None:
    """Drop what was used longest ago."""
    with _opened(cache, store) as opened:
        if max_bytes is None and max_days is None:
            raise InputError("say what to drop: give --max-bytes, --max-days or both")
        age = None if max_days is None else max_days * 86400
        dropped = opened.evict(max_bytes=max_bytes, max_age=age)
    console.print(f"dropped {dropped} entries", highlight=False)


@app.command()
def verify(
    *, namespace: Namespaces = None, cache: options.Cache = None, store: Store = None
) -> None:
    """Read every entry; those that are damaged are dropped, and solved again when needed."""
    with _opened(cache, store) as opened:
        damaged = list(verify_entries(opened, namespace))
    for entry in damaged:
        errors.print(marked("damaged:", f"{entry.namespace}/{entry.key}"), soft_wrap=True)
    if damaged:
        raise typer.Exit(1)
    console.print("every entry is intact")


@app.command("export")
def export_cache(
    file: Annotated[Path, typer.Argument(help="A .tar file, or .tar.gz.")],
    *,
    namespace: Namespaces = None,
    cache: options.Cache = None,
    store: Store = None,
) -> None:
    """Write entries to a tar file of digests and bytes."""
    with _opened(cache, store) as opened:
        count = export_entries(opened, file, namespace)
    console.print(f"wrote {count} entries", highlight=False)


@app.command("import")
def import_cache(
    file: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    *,
    cache: options.Cache = None,
    store: Store = None,
) -> None:
    """Add the entries of a tar file; each is checked, and what is there already stays.

    Import only from those whose plans you would use: the digests show that nothing was damaged,
    not who made it.
    """
    with _opened(cache, store) as opened:
        found = import_entries(opened, file)
    for name in found.rejected:
        errors.print(marked("refused:", name), soft_wrap=True)
    known = f"{found.num_existing} were known"
    console.print(f"added {found.num_added} entries, {known}", highlight=False)
    if found.rejected:
        raise typer.Exit(1)


@contextmanager
def _opened(folder: Path | None, store: str | None) -> Iterator[Cache]:
    """The folder or the database; what is wrong with it is told as what is wrong with input."""
    with reported():
        if store is None:
            with _told(CacheFileError, NamespaceError), closing(FolderCache(folder)) as found:
                yield found
            return
        # A database library takes long to import.
        from autoshard_solver_cache import SolverCache, StoreUnavailableError  # noqa: PLC0415

        with _told(CacheFileError, StoreUnavailableError), closing(SolverCache(store)) as kept:
            yield kept


@contextmanager
def _told(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise InputError(str(error)) from error


def _print_namespaces(cache: Cache, *, json: bool) -> None:
    table = _table("namespace", "entries", "as stored")
    for namespace in cache.namespaces():
        stats = cache.stats(namespace)
        if json:
            figures = {"num_entries": stats.num_entries, "nbytes": stats.nbytes}
            _print_line({"namespace": namespace, **figures})
        table.add_row(namespace, str(stats.num_entries), format_bytes(stats.nbytes))
    if not json:
        console.print(table)


def _print_entries(entries: Iterator[EntryInfo], *, json: bool) -> None:
    table = _table("key", "bytes", "as stored", "made", "used")
    for e in entries:
        if json:
            times = {"created_at": e.created_at, "used_at": e.used_at}
            sizes = {"size": e.size, "stored_size": e.stored_size}
            _print_line({"namespace": e.namespace, "key": e.key, **sizes, **times})
        sizes_text = map(format_bytes, (e.size, e.stored_size))
        table.add_row(e.key, *sizes_text, _ago(e.created_at), _ago(e.used_at))
    if not json:
        console.print(table)


def _print_line(line: dict[str, object]) -> None:
    typer.echo(js.dumps(line))


def _table(first: str, *others: str) -> Table:
    table = titled_table("")
    table.add_column(first, style="cyan", overflow="fold")
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _ago(seconds_since_1970: float, clock: Callable[[], float] = time.time) -> str:
    seconds = max(0.0, clock() - seconds_since_1970)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
