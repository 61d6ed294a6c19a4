"""The `autoshard` command: all its subcommands, and those that start the service."""

from importlib.metadata import version
from typing import Annotated

import typer

from autoshard.cli import planning, plans, runs, stores
from autoshard.cli.options import expand_groups
from autoshard.cli.output import console, reported

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan how a PyTorch model is sharded over a device mesh.",
)


def main() -> None:
    """Entry point of the `autoshard` command."""
    app()


def _version(*, value: bool) -> None:
    if value:
        typer.echo(f"autoshard {version('autoshard')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


for _command in (
    planning.plan,
    planning.search,
    planning.coverage,
    plans.show,
    plans.check,
    plans.explain,
    plans.compare,
    plans.export,
    runs.simulate,
    runs.calibrate,
    runs.profile,
):
    app.command()(expand_groups(_command))
app.command(context_settings=runs.PASSED_ON)(runs.launch)
app.add_typer(plans.mase, name="mase")
app.add_typer(stores.cache, name="cache")
app.add_typer(stores.keys, name="keys")


@app.command()
def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    auth: Annotated[
        bool | None,
        typer.Option(
            help="Require an API key of `autoshard keys`; default: on every address but loopback."
        ),
    ] = None,
) -> None:
    """Start the planning service."""
    from autoshard_server.serve import serve as run  # noqa: PLC0415  the library works without it

    run(host=host, port=port, auth=auth)


@app.command()
def worker(
    *,
    store: Annotated[
        str | None,
        typer.Option(
            help="Database of the service, as a SQLAlchemy URL; better in AUTOSHARD_STORE_URL, "
            "where other users cannot read it."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of jobs that run at once; default AUTOSHARD_NUM_WORKERS."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address for --port; default AUTOSHARD_WORKER_HOST, or 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Serve /livez and /metrics on this port; default AUTOSHARD_WORKER_PORT, or none."
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Lowest level that is logged: debug, info, warning or error.")
    ] = "info",
) -> None:
    """Run jobs of a service on this host too; after SIGTERM, running jobs may finish in time."""
    from autoshard_server.serve import run_workers  # noqa: PLC0415  the library works without it

    run_workers(store_url=store, num_workers=workers, host=host, port=port, log_level=log_level)


@app.command()
def demo() -> None:
    """Plan GPT-2 through the service, then run a small one sharded on 4 ranks."""
    from autoshard.cli.demo import run_demo  # noqa: PLC0415  it needs transformers

    with reported():
        run_demo(console)
