"""The command line: plan, show, check, serve, demo."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from autoshard.costs import parse_bytes
from autoshard.errors import AutoshardError, OptionError, PlanError
from autoshard.graph import load_graph
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import Mode, Plan, PlanOptions, check_plan, make_plan
from autoshard.render import render_plan

NO_PLAN = 3
"""Exit status where planning ended without a plan: infeasible, or out of time."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan how a PyTorch model is sharded over a device mesh.",
)
_console = Console()
_errors = Console(stderr=True)


def main() -> None:
    """Entry point of the `autoshard` command."""
    app()


@contextmanager
def _reported() -> Iterator[None]:
    """Users see what is wrong with their input, not where we noticed."""
    try:
        yield
    except (AutoshardError, OSError) as error:
        _errors.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


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


@app.command()
def plan(
    graph: Annotated[Path, typer.Argument(help="A .pt2 archive, or its model.json.")],
    *,
    mesh: Annotated[str, typer.Option(help="Size of each axis, outermost first: 2,4.")],
    axes: Annotated[str | None, typer.Option(help="Name of each axis: dp,tp.")] = None,
    topology: Annotated[str | None, typer.Option(help="A topology preset by name.")] = None,
    intra_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second inside a node: the last axis.")
    ] = None,
    inter_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second between nodes: the earlier axes.")
    ] = None,
    mode: Annotated[str, typer.Option(help="training or inference.")] = "training",
    optimizer: Annotated[str, typer.Option(help="Whose state is kept in training.")] = "adamw",
    memory: Annotated[
        str | None, typer.Option(help="Budget per device, such as 80GB; default: all it has.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.")] = 120.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write the plan.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a graph on a mesh, and show or write the plan."""
    with _reported():
        found = make_plan(
            load_graph(graph),
            _mesh(mesh, axes, topology, intra_bandwidth, inter_bandwidth),
            PlanOptions(
                mode=_mode(mode),
                optimizer=optimizer,
                memory_budget=None if memory is None else parse_bytes(memory),
                time_limit=time_limit,
            ),
        )
        if output is not None:
            output.write_text(found.to_json(indent=1), encoding="utf-8")
    if json:
        sys.stdout.write(found.to_json() + "\n")
    else:
        _console.print(render_plan(found))
    if not found.found:
        raise typer.Exit(NO_PLAN)


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(help="A plan as `autoshard plan -o` wrote it.")],
) -> None:
    """Show a plan as tables."""
    with _reported():
        _console.print(render_plan(_read(plan)))


@app.command()
def check(
    graph: Annotated[Path, typer.Argument(help="The archive that was planned.")],
    plan: Annotated[Path, typer.Argument(help="The plan.")],
) -> None:
    """Check a plan against its graph: is it legal, and does it cost what it says?"""
    with _reported():
        findings = check_plan(_read(plan), load_graph(graph))
    for finding in findings:
        _errors.print(f"[bold red]wrong:[/] {finding}", highlight=False, soft_wrap=True)
    if findings:
        raise typer.Exit(1)
    _console.print("the plan is legal and costs what it says")


@app.command()
def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
) -> None:
    """Start the planning service."""
    from autoshard_server.serve import serve as run  # noqa: PLC0415  the library works without it

    run(host=host, port=port)


@app.command()
def demo() -> None:
    """Plan GPT-2 through the service, then run a small one sharded on 4 ranks."""
    from autoshard.demo import run_demo  # noqa: PLC0415  it needs transformers

    with _reported():
        run_demo(_console)


def _mesh(
    shape: str,
    axes: str | None,
    topology: str | None,
    intra_bandwidth: float | None,
    inter_bandwidth: float | None,
) -> Mesh:
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        raise OptionError(f"--mesh {shape!r} is not a list of sizes such as 2,4") from None
    return make_mesh(
        sizes,
        axes=None if axes is None else axes.split(","),
        topology=topology,
        intra_bandwidth=intra_bandwidth,
        inter_bandwidth=inter_bandwidth,
    )


def _mode(text: str) -> Mode:
    modes: tuple[Mode, ...] = get_args(Mode)
    for mode in modes:
        if mode == text:
            return mode
    raise OptionError(f"--mode {text!r} is unknown; choose {' or '.join(modes)}")


def _read(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_bytes())
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


if __name__ == "__main__":
    main()
