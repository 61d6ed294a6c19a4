"""Commands that plan a graph: plan, search, coverage; in this process, or at a service."""

from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.exit_codes import NO_PLAN
from autoshard.cli.options import (
    Archive,
    Connection,
    CustomOperators,
    Planning,
    PlanOutput,
    Topology,
    read_sizes,
    read_topology,
)
from autoshard.cli.output import (
    console,
    errors,
    marked,
    progress_bar,
    write_file,
    write_stdout,
)
from autoshard.cli.render import render_coverage, render_plan, render_search
from autoshard.client import PlanResult
from autoshard.mesh import make_mesh
from autoshard.plan import Plan

_SOURCES = {
    "service": "made by the service",
    "offline": "the service does not answer; this plan was kept on this machine",
    "local": "made in this process",
}


def plan(
    graph: Archive,
    *,
    mesh: Annotated[str, typer.Option(help="Size of each axis, outermost first: 2,4.")],
    axes: Annotated[str | None, typer.Option(help="Name of each axis: dp,tp.")] = None,
    topology: Topology = None,
    intra_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second inside a node: the last axis.")
    ] = None,
    inter_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second between nodes: the earlier axes.")
    ] = None,
    planning: Planning,
    custom: CustomOperators,
    connection: Connection,
    output: PlanOutput = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a graph on a mesh, and show or write the plan."""
    devices = make_mesh(
        read_sizes(mesh),
        axes=None if axes is None else axes.split(","),
        topology=read_topology(topology),
        intra_bandwidth=intra_bandwidth,
        inter_bandwidth=inter_bandwidth,
    )
    options, discover = planning.read(), custom.discover()
    with connection.open() as client, progress_bar() as report:
        result = client.request_plan(
            graph, mesh=devices, options=options, discover=discover, on_progress=report
        )
    found = result.plan
    assert found is not None, "the request waits for the plan"
    if connection.server:
        errors.print(marked("plan:", _source(result), style="bold"), highlight=False)
    _write(found, output)
    if json:
        write_stdout(found.to_json() + "\n")
    else:
        console.print(render_plan(found))
    if not found.found:
        raise typer.Exit(NO_PLAN)


def search(
    graph: Archive,
    *,
    devices: Annotated[int, typer.Option(help="Number of devices of the mesh.")],
    topology: Topology = None,
    max_axes: Annotated[int, typer.Option(help="Largest number of mesh axes.")] = 3,
    workers: Annotated[
        int, typer.Option(help="Number of meshes planned at the same time, without a service.")
    ] = 2,
    planning: Planning,
    custom: CustomOperators,
    connection: Connection,
    output: PlanOutput = None,
) -> None:
    """Plan a graph on every mesh of a number of devices, and rank the meshes."""
    options, discover = planning.read(), custom.discover()
    with connection.open(num_workers=workers) as client:
        with progress_bar() as report:
            found = client.search(
                graph,
                num_devices=devices,
                topology=read_topology(topology),
                max_axes=max_axes,
                options=options,
                discover=discover,
                on_progress=report,
            )
        ids = [mesh.plan_id for mesh in found.meshes]
        plans = [None if known is None else client.get_plan(known) for known in ids]
    best = plans[0]
    if best is not None:
        _write(best, output)
    console.print(render_search(found, plans))
    if best is None or not best.found:
        raise typer.Exit(NO_PLAN)


def coverage(
    graph: Archive,
    plan: Annotated[
        str | None,
        typer.Argument(help="A plan of the graph, for the time of each operator on its mesh."),
    ] = None,
    *,
    custom: CustomOperators,
    connection: Connection,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """List the operators of a graph, those that cannot be sharded and why, and their cost.

    With a plan, the costs are worked out in this process.
    """
    made, discover = None if plan is None else connection.read_plan(plan), custom.discover()
    with connection.open() as client:
        found = client.coverage(graph, plan=made, discover=discover)
    if json:
        write_stdout(found.model_dump_json() + "\n")
    else:
        console.print(render_coverage(found))


def _source(result: PlanResult) -> str:
    if result.source == "service" and result.cached:
        return "already known to the service"
    return _SOURCES[result.source]


def _write(plan: Plan, path: Path | None) -> None:
    if path is not None:
        write_file(path, plan.to_json(indent=1))
