"""The command line: its commands by name, and those that look at plans."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli import cache as cache_commands
from autoshard.cli import exports, keys, options, planning, runs
from autoshard.cli.output import console, errors, marked, read_plan, reported
from autoshard.cli.programs import as_planned
from autoshard.cli.render import render_difference, render_explanation, render_plan
from autoshard.plan import check_plan, compare_plans
from autoshard.planner import explain

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


app.command("plan")(planning.plan)
app.command("search")(planning.search)
app.command("ops")(planning.ops)


@app.command()
def show(plan: options.PlanFile) -> None:
    """Show a plan as tables."""
    with reported():
        console.print(render_plan(read_plan(plan)))


@app.command()
def check(
    graph: Annotated[Path, typer.Argument(help="The archive that was planned.")],
    plan: Annotated[Path, typer.Argument(help="The plan.")],
) -> None:
    """Check a plan against its graph: is it legal, and does it cost what it says?"""
    with reported():
        made = read_plan(plan)
        findings = check_plan(made, as_planned(graph, made))
    for finding in findings:
        errors.print(marked("wrong:", finding), soft_wrap=True)
    if findings:
        raise typer.Exit(1)
    console.print("the plan is legal and costs what it says")


@app.command("explain")
def explain_choice(
    graph: Annotated[Path, typer.Argument(help="The archive that was planned.")],
    plan: Annotated[Path, typer.Argument(help="The plan.")],
    name: Annotated[str, typer.Argument(help="A node, parameter, input, value or output.")],
    *,
    value: Annotated[
        bool, typer.Option("--value", help="Where a node and a value share the name: the value.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Most alternatives to show.")] = 20,
    time_limit: Annotated[
        float, typer.Option(help="Seconds for what must be planned anew.")
    ] = 60.0,
) -> None:
    """Show every alternative of one choice of a plan, with its price."""
    with reported():
        made = read_plan(plan)
        explanation = explain(
            as_planned(graph, made), made, name, value=value, time_limit=time_limit
        )
    console.print(render_explanation(explanation, most=limit))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan.")],
    after: Annotated[Path, typer.Argument(help="Another plan of the same graph.")],
) -> None:
    """Show what distinguishes two plans of one graph."""
    with reported():
        difference = compare_plans(read_plan(before), read_plan(after))
    console.print(render_difference(difference))


app.command("export")(exports.export_plan)
app.add_typer(exports.mase, name="mase")
app.add_typer(cache_commands.app, name="cache")
app.add_typer(keys.app, name="keys")
app.command("simulate")(runs.simulate_plan)
app.command("launch", context_settings=runs.PASSED_ON)(runs.launch)
app.command("calibrate")(runs.calibrate)
app.command("profile")(runs.profile_plan)


@app.command()
def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    auth: Annotated[
        bool | None,
        typer.Option(
            help="Whether callers need a key of `autoshard keys`; on every address but loopback."
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
        int | None, typer.Option(help="Solves that run at once; default AUTOSHARD_NUM_WORKERS.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address for --port; default AUTOSHARD_WORKER_HOST, or 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Answer /livez and /metrics on this port; default AUTOSHARD_WORKER_PORT, or none."
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Least to log: debug, info, warning or error.")
    ] = "info",
) -> None:
    """Run jobs of a service on this host too; SIGTERM lets running ones finish, within limits."""
    from autoshard_server.work import work  # noqa: PLC0415  the library works without it

    work(store_url=store, num_workers=workers, host=host, port=port, log_level=log_level)


@app.command()
def demo() -> None:
    """Plan GPT-2 through the service, then run a small one sharded on 4 ranks."""
    from autoshard.cli.demo import run_demo  # noqa: PLC0415  it needs transformers

    with reported():
        run_demo(console)
