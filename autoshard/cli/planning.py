"""Commands that plan: here, or at a service."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli import options
from autoshard.cli.output import console, errors, read_plan, reported
from autoshard.cli.programs import as_planned, read_program
from autoshard.cli.remote import cover_remotely, plan_remotely, search_remotely
from autoshard.cli.render import render_candidates, render_coverage, render_plan
from autoshard.cli.texts import read_options, read_sizes, read_topology
from autoshard.graph import Graph
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import Plan, operator_coverage
from autoshard.planner import make_plan, search_meshes
from autoshard.solve import KeyValueStore

NO_PLAN = 3
"""Exit status where planning ended without a plan: infeasible, or out of time."""

_CACHE_BYTES = 256 << 20
"""Room for solved blocks; the least recently used go first."""


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
    reshard_after_forward: options.Regather = "auto",
    activation_checkpointing: options.Checkpointing = "auto",
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
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
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
            block_cache = _shelf(cache, "blocks", closed=no_cache)
            found = make_plan(program, devices, asked, block_cache=block_cache)
        _write(found, output)
    if json:
        sys.stdout.write(found.to_json() + "\n")
    else:
        console.print(render_plan(found))
    if not found.found:
        raise typer.Exit(NO_PLAN)


def search(
    graph: options.Archive,
    *,
    devices: Annotated[int, typer.Option(help="How many devices the mesh has.")],
    topology: options.Topology = None,
    max_axes: Annotated[int, typer.Option(help="Largest number of axes.")] = 3,
    workers: Annotated[int, typer.Option(help="Processes that plan here at the same time.")] = 2,
    mode: options.Mode = "training",
    optimizer: options.Optimizer = "adamw",
    master_weights: options.MasterWeights = False,
    state_dtype: options.StateDType = None,
    memory: options.Memory = None,
    reshard_after_forward: options.Regather = "auto",
    activation_checkpointing: options.Checkpointing = "auto",
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
) -> None:
    """Plan a graph on every mesh of so many devices, and rank the meshes."""
    with reported():
        asked = read_options(
            mode=mode,
            optimizer=optimizer,
            master_weights=master_weights,
            state_dtype=state_dtype,
            memory=memory,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            overlap=overlap,
            time_limit=time_limit,
            algo=algo,
            pins=pin or (),
            forbid=forbid or (),
            batch_axis=batch_axis,
            skip_fully_replicated=skip_fully_replicated,
        )
        cluster = read_topology(topology)
        if server:
            candidates = search_remotely(
                server,
                graph,
                devices,
                asked,
                topology=cluster,
                max_axes=max_axes,
                modules=imports or (),
                discover=not no_discover,
            )
        else:
            with console.status("reading the graph") as status:
                candidates = search_meshes(
                    _program(graph, imports, cache, no_discover=no_discover, no_cache=no_cache),
                    devices,
                    topology=cluster,
                    max_axes=max_axes,
                    num_workers=workers,
                    on_progress=lambda progress: status.update(progress.phase),
                    options=asked,
                    block_cache=_shelf(cache, "blocks", closed=no_cache),
                )
        best = candidates[0].plan
        if best is not None:
            _write(best, output)
    console.print(render_candidates(candidates))
    if best is None or not best.found:
        raise typer.Exit(NO_PLAN)


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
    server: options.Server = None,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Show which operators a graph uses, which cannot be cut and why, and what that costs.

    What a plan costs is worked out here, with a service too.
    """
    with reported():
        if plan is not None:
            found = read_plan(plan)
            coverage = operator_coverage(as_planned(graph, found), found)
        elif server:
            coverage = cover_remotely(
                server, graph, modules=imports or (), discover=not no_discover
            )
        else:
            program = _program(graph, imports, cache, no_discover=no_discover, no_cache=no_cache)
            coverage = operator_coverage(program)
    if json:
        sys.stdout.write(coverage.model_dump_json() + "\n")
    else:
        console.print(render_coverage(coverage))


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


def _shelf(folder: Path | None, namespace: str, *, closed: bool) -> KeyValueStore | None:
    if closed:
        return None
    from autoshard_solver_cache import FolderCache, NamespacedCache  # noqa: PLC0415  --no-cache needs none

    return NamespacedCache(FolderCache(folder, max_bytes=_CACHE_BYTES), namespace)


def _note(text: str) -> None:
    errors.print(f"[bold]note:[/] {text}", highlight=False, soft_wrap=True)


def _write(plan: Plan, path: Path | None) -> None:
    if path is not None:
        path.write_text(plan.to_json(indent=1), encoding="utf-8")
