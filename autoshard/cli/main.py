"""The command line: planning and looking at plans here, steps of plans in `runs`."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli import cache as cache_commands
from autoshard.cli import exports, keys, options, runs
from autoshard.cli.output import console, errors, marked, read_plan, reported
from autoshard.cli.programs import as_planned, read_program
from autoshard.cli.remote import plan_remotely
from autoshard.cli.render import (
    render_candidates,
    render_coverage,
    render_difference,
    render_explanation,
    render_plan,
)
from autoshard.cli.texts import read_options, read_sizes, read_topology
from autoshard.graph import Graph
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import (
    Plan,
    check_plan,
    compare_plans,
    explain,
    make_plan,
    operator_coverage,
    search_meshes,
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


@app.command()
def plan(
    graph: options.Archive,
    *,
    mesh: Annotated[str, typer.Option(help="Size of each axis, outermost first: 2,4.")],
    axes: Annotated[str | None, typer.Option(help="Name of each axis: dp,tp.")] = None,
    topology: options.Topology = None,
    intra_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second inside a node: the last axis.")
    ] = None,
    inter_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second between nodes: the earlier axes.")
    ] = None,
    mode: options.Mode = "training",
    optimizer: options.Optimizer = "adamw",
    master_weights: options.MasterWeights = False,
    state_dtype: options.StateDType = None,
    memory: options.Memory = None,
    reconversion: options.Reconversion = "auto",
    checkpointing: options.Checkpointing = "auto",
    overlap: options.Overlap = False,
    time_limit: options.TimeLimit = 60.0,
    algo: options.Algo = "optimal",
    pin: options.Pin = None,
    forbid: options.Forbid = None,
    batch_axis: options.BatchAxis = None,
    skip_fully_replicated: options.SkipReplicated = False,
    cache: options.Cache = None,
    no_cache: options.NoCache = False,
    imports: options.Import = None,
    no_discover: options.NoDiscover = False,
    server: options.Server = None,
    output: options.Output = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a graph on a mesh, and show or write the plan."""
    with reported():
        devices = _mesh(mesh, axes, topology, intra_bandwidth, inter_bandwidth)
        asked = read_options(
            mode=mode,
            optimizer=optimizer,
            master_weights=master_weights,
            state_dtype=state_dtype,
            memory=memory,
            reconversion=reconversion,
            checkpointing=checkpointing,
            overlap=overlap,
            time_limit=time_limit,
            algo=algo,
            pins=pin or (),
            forbid=forbid or (),
            batch_axis=batch_axis,
            skip_fully_replicated=skip_fully_replicated,
        )
        if server:
            found = plan_remotely(
                server, graph, devices, asked, modules=imports or (), discover=not no_discover
            )
        else:
            program = _program(graph, imports, cache, no_discover=no_discover, no_cache=no_cache)
            tables = _shelf(cache, "blocks", closed=no_cache)
            found = make_plan(program, devices, asked, tables=tables)
        _write(found, output)
    if json:
        sys.stdout.write(found.to_json() + "\n")
    else:
        console.print(render_plan(found))
    if not found.found:
        raise typer.Exit(NO_PLAN)


@app.command()
def search(
    graph: options.Archive,
    *,
    devices: Annotated[int, typer.Option(help="How many devices the mesh has.")],
    topology: options.Topology = None,
    max_axes: Annotated[int, typer.Option(help="Largest number of axes.")] = 3,
    workers: Annotated[int, typer.Option(help="Processes that plan at the same time.")] = 2,
    mode: options.Mode = "training",
    optimizer: options.Optimizer = "adamw",
    master_weights: options.MasterWeights = False,
    state_dtype: options.StateDType = None,
    memory: options.Memory = None,
    reconversion: options.Reconversion = "auto",
    checkpointing: options.Checkpointing = "auto",
    overlap: options.Overlap = False,
    time_limit: options.TimeLimit = 60.0,
    algo: options.Algo = "optimal",
    pin: options.Pin = None,
    forbid: options.Forbid = None,
    batch_axis: options.BatchAxis = None,
    skip_fully_replicated: options.SkipReplicated = False,
    cache: options.Cache = None,
    no_cache: options.NoCache = False,
    imports: options.Import = None,
    no_discover: options.NoDiscover = False,
    output: options.Output = None,
) -> None:
    """Plan a graph on every mesh of so many devices, and rank the meshes."""
    with reported(), console.status("reading the graph") as status:
        candidates = search_meshes(
            _program(graph, imports, cache, no_discover=no_discover, no_cache=no_cache),
            devices,
            topology=read_topology(topology),
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
                overlap=overlap,
                time_limit=time_limit,
                algo=algo,
                pins=pin or (),
                forbid=forbid or (),
                batch_axis=batch_axis,
                skip_fully_replicated=skip_fully_replicated,
            ),
            tables=_shelf(cache, "blocks", closed=no_cache),
        )
        best = candidates[0].plan
        if best is not None:
            _write(best, output)
    console.print(render_candidates(candidates))
    if best is None or not best.found:
        raise typer.Exit(NO_PLAN)


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
def ops(
    graph: options.Archive,
    plan: Annotated[
        Path | None, typer.Argument(help="A plan of it, for the times on the plan's mesh.")
    ] = None,
    *,
    cache: options.Cache = None,
    no_cache: options.NoCache = False,
    imports: options.Import = None,
    no_discover: options.NoDiscover = False,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Show which operators a graph uses, which cannot be cut and why, and what that costs."""
    with reported():
        found = None if plan is None else read_plan(plan)
        if found is None:
            program = _program(graph, imports, cache, no_discover=no_discover, no_cache=no_cache)
        else:
            program = as_planned(graph, found)
        coverage = operator_coverage(program, found)
    if json:
        sys.stdout.write(coverage.model_dump_json() + "\n")
    else:
        console.print(render_coverage(coverage))


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


def _program(
    path: Path,
    imports: list[str] | None,
    cache: Path | None,
    *,
    no_discover: bool,
    no_cache: bool,
) -> Graph:
    return read_program(
        path,
        modules=imports or (),
        discover=not no_discover,
        store=_shelf(cache, "rules", closed=no_cache),
        report=_note,
    )


def _mesh(
    shape: str,
    axes: str | None,
    topology: str | None,
    intra_bandwidth: float | None,
    inter_bandwidth: float | None,
) -> Mesh:
    return make_mesh(
        read_sizes(shape),
        axes=None if axes is None else axes.split(","),
        topology=read_topology(topology),
        intra_bandwidth=intra_bandwidth,
        inter_bandwidth=inter_bandwidth,
    )


def _shelf(folder: Path | None, namespace: str, *, closed: bool) -> TableStore | None:
    if closed:
        return None
    from autoshard_solver_cache import FolderCache, Shelf  # noqa: PLC0415  --no-cache needs none

    return Shelf(FolderCache(folder, max_bytes=_CACHE_BYTES), namespace)


def _note(text: str) -> None:
    errors.print(f"[bold]note:[/] {text}", highlight=False, soft_wrap=True)


def _write(plan: Plan, path: Path | None) -> None:
    if path is not None:
        path.write_text(plan.to_json(indent=1), encoding="utf-8")
