"""The command that lists topologies: `autoshard topologies`."""

import json as js
from typing import Annotated, Any

import typer

from autoshard.cli.options import Connection
from autoshard.cli.output import console, write_stdout
from autoshard.mesh import Topology
from autoshard.quantities import format_bytes, format_flops, format_rate


def topologies(
    *,
    connection: Connection,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """List the clusters that --topology can name, with their devices and links.

    With a service, its stored topologies are listed too.
    """
    with connection.open() as client:
        found = [client.get_topology(name) for name in client.list_topologies()]
    if json:
        write_stdout(js.dumps([_figures(topology) for topology in found]) + "\n")
    else:
        console.print(_lines(found), soft_wrap=True, highlight=False, markup=False)


def _figures(topology: Topology) -> dict[str, Any]:
    return {
        "name": topology.name,
        "device": topology.device.name,
        "memory": topology.device.memory,
        "peak_bfloat16": topology.device.peak("bfloat16"),
        "devices_per_node": topology.devices_per_node,
        "links": [
            {"name": link.name, "group_size": link.size, "bandwidth": link.bandwidth}
            for link in topology.levels
        ],
    }


def _lines(found: list[Topology]) -> str:
    """A line per topology, aligned; bandwidths are those of the links, innermost first."""
    rows = [("name", "device", "memory", "bfloat16", "a node", "bandwidth per device")]
    for topology in found:
        links = (f"{link.name} {format_rate(link.bandwidth)}" for link in topology.levels)
        device = topology.device
        rows.append(
            (
                topology.name,
                device.name,
                format_bytes(device.memory),
                format_flops(device.peak("bfloat16")),
                str(topology.devices_per_node or "-"),
                ", ".join(links),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
