"""The command line: plan, search, show, check, explain, diff, serve, demo."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autoshard.errors import AutoshardError, OptionError, PlanError
from autoshard.graph import load_graph
from autoshard.mesh import Mesh, make_mesh
from autoshard.option_texts import read_options
from autoshard.plan import Plan, check_plan, compare_plans, explain, make_plan, search_meshes
from autoshard.render import (
    render_candidates,
    render_difference,
    render_explanation,
    render_plan,
)
from autoshard.solve import TableStore

NO_PLAN = 3
"""Exit status where planning ended without a plan: infeasible, or out of time."""

_CACHE_BYTES = 256 << 20
"""Room for solved blocks; the least recently used go first."""

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


_Archive = Annotated[Path, typer.Argument(help="A .pt2 archive, or its model.json.")]
_Topology = Annotated[str | None, typer.Option(help="A topology preset by name.")]
_Mode = Annotated[str, typer.Option("--mode", help="training or inference.")]
_Optimizer = Annotated[str, typer.Option(help="Whose state is kept in training.")]
_Memory = Annotated[
    str | None, typer.Option(help="Budget per device, such as 80GB; default: all it has.")
]
_MasterWeights = Annotated[
    bool,
    typer.Option("--master-weights", help="The optimizer keeps a float32 copy of parameters."),
]
_StateDType = Annotated[
    str | None,
    typer.Option("--state-dtype", help="Of the optimizer's state: float32, float16 or bfloat16."),
]
_Reconversion = Annotated[
    str,
    typer.Option(
        help="Whether backward converts tensors again instead of holding them, such as gathered "
        "parameters: auto, never or always."
    ),
]
_Checkpointing = Annotated[
    str,
    typer.Option(
        help="Whether repeated blocks run again in backward to hold less: auto, never or always."
    ),
]
_TimeLimit = Annotated[float, typer.Option(help="Seconds for the solver, per plan.")]
_Algo = Annotated[
    str, typer.Option(help="optimal, or megatron: that fixed pattern, as a baseline.")
]
_Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        help="KIND:NAME=LAYOUT with KIND input, output, parameter or node; NAME may be a "
        "pattern: 'parameter:*.wte.weight=*,S(0)'. May be repeated.",
    ),
]
_Forbid = Annotated[
    list[str] | None,
    typer.Option("--forbid", help="COLLECTIVE or COLLECTIVE@AXIS: all_to_all@tp. Repeatable."),
]
_BatchAxis = Annotated[
    str | None, typer.Option(help="The axis that cuts the batch dim; no other axis does.")
]
_SkipReplicated = Annotated[
    bool,
    typer.Option(
        "--skip-fully-replicated",
        help="No operator that can be cut does all of its work on every rank.",
    ),
]
_Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        envvar="AUTOSHARD_CACHE",
        help="Folder of solved blocks, which other plans reuse; default: in your cache folder.",
    ),
]
_NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Solve everything anew, and keep nothing.")
]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the plan.")]


@app.command()
def plan(
    graph: _Archive,
    *,
    mesh: Annotated[str, typer.Option(help="Size of each axis, outermost first: 2,4.")],
    axes: Annotated[str | None, typer.Option(help="Name of each axis: dp,tp.")] = None,
    topology: _Topology = None,
    intra_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second inside a node: the last axis.")
    ] = None,
    inter_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second between nodes: the earlier axes.")
    ] = None,
    mode: _Mode = "training",
    optimizer: _Optimizer = "adamw",
    master_weights: _MasterWeights = False,
    state_dtype: _StateDType = None,
    memory: _Memory = None,
    reconversion: _Reconversion = "auto",
    checkpointing: _Checkpointing = "auto",
    time_limit: _TimeLimit = 60.0,
    algo: _Algo = "optimal",
    pin: _Pin = None,
    forbid: _Forbid = None,
    batch_axis: _BatchAxis = None,
    skip_fully_replicated: _SkipReplicated = False,
    cache: _Cache = None,
    no_cache: _NoCache = False,
    output: _Output = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a graph on a mesh, and show or write the plan."""
    with _reported():
        found = make_plan(
            load_graph(graph),
            _mesh(mesh, axes, topology, intra_bandwidth, inter_bandwidth),
            read_options(
                mode=mode,
                optimizer=optimizer,
                master_weights=master_weights,
                state_dtype=state_dtype,
                memory=memory,
                reconversion=reconversion,
                checkpointing=checkpointing,
                time_limit=time_limit,
                algo=algo,
                pins=pin or (),
                forbid=forbid or (),
                batch_axis=batch_axis,
                skip_fully_replicated=skip_fully_replicated,
            ),
            tables=None if no_cache else _solved_blocks(cache),
        )
        _write(found, output)
    if json:
        sys.stdout.write(found.to_json() + "\n")
    else:
        _console.print(render_plan(found))
    if not found.found:
        raise typer.Exit(NO_PLAN)


@app.command()
def search(
    graph: _Archive,
    *,
    devices: Annotated[int, typer.Option(help="How many devices the mesh has.")],
    topology: _Topology = None,
    max_axes: Annotated[int, typer.Option(help="Largest number of axes.")] = 3,
    workers: Annotated[int, typer.Option(help="Processes that plan at the same time.")] = 2,
    mode: _Mode = "training",
    optimizer: _Optimizer = "adamw",
    master_weights: _MasterWeights = False,
    state_dtype: _StateDType = None,
    memory: _Memory = None,
    reconversion: _Reconversion = "auto",
    checkpointing: _Checkpointing = "auto",
    time_limit: _TimeLimit = 60.0,
    algo: _Algo = "optimal",
    pin: _Pin = None,
    forbid: _Forbid = None,
    batch_axis: _BatchAxis = None,
    skip_fully_replicated: _SkipReplicated = False,
    output: _Output = None,
) -> None:
    """Plan a graph on every mesh of so many devices, and rank the meshes."""
    with _reported(), _console.status("reading the graph") as status:
        candidates = search_meshes(
            load_graph(graph),
            devices,
            topology=topology,
            max_axes=max_axes,
            num_workers=workers,
            on_progress=lambda p: status.update(f"planned {p.done} of {p.total} meshes"),
            options=read_options(
                mode=mode,
                optimizer=optimizer,
                master_weights=master_weights,
                state_dtype=state_dtype,
                memory=memory,
                reconversion=reconversion,
                checkpointing=checkpointing,
                time_limit=time_limit,
                algo=algo,
                pins=pin or (),
                forbid=forbid or (),
                batch_axis=batch_axis,
                skip_fully_replicated=skip_fully_replicated,
            ),
        )
        best = candidates[0].plan
        if best is not None:
            _write(best, output)
    _console.print(render_candidates(candidates))
    if best is None or not best.found:
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
    with _reported():
        explanation = explain(
            load_graph(graph), _read(plan), name, value=value, time_limit=time_limit
        )
    _console.print(render_explanation(explanation, most=limit))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan.")],
    after: Annotated[Path, typer.Argument(help="Another plan of the same graph.")],
) -> None:
    """Show what distinguishes two plans of one graph."""
    with _reported():
        difference = compare_plans(_read(before), _read(after))
    _console.print(render_difference(difference))


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


def _solved_blocks(folder: Path | None) -> TableStore:
    from autoshard_solver_cache import FolderCache, Shelf  # noqa: PLC0415  --no-cache needs none

    return Shelf(FolderCache(folder, max_bytes=_CACHE_BYTES), "blocks")


def _write(plan: Plan, path: Path | None) -> None:
    if path is not None:
        path.write_text(plan.to_json(indent=1), encoding="utf-8")


def _read(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_bytes())
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


if __name__ == "__main__":
    main()
