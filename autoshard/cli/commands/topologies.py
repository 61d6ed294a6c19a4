"""The command that lists topologies: `autoshard topologies`."""

import json as js
from typing import Any

from autoshard.base.quantities import format_flops, format_rate
from autoshard.cli.options import Connection, OutputOptions
from autoshard.cli.rendering.output import print_output, write_stdout
from autoshard.mesh import Topology, get_topology, list_topologies
from autoshard.report.tables import Column, Report, Table, Unit


def topologies(
    *,
    connection: Connection,
    output: OutputOptions,
) -> None:
    """List the clusters that --topology can name, with their devices and links.

    With a service, its stored topologies are listed too.
    """
    if connection.server:
        with connection.open() as client:
            found = [client.get_topology(name) for name in client.list_topologies()]
    else:
        found = [get_topology(name) for name in list_topologies()]
    if output.chosen == "json":
        write_stdout(js.dumps([_figures(topology) for topology in found]) + "\n")
    else:
        print_output(Report.of(_table(found)), output.chosen)


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


def _table(found: list[Topology]) -> Table:
    """A row per topology; bandwidths are those of the links, innermost first."""
    columns = [Column("name"), Column("device"), Column("memory", Unit.BYTES)]
    columns += [Column("bfloat16"), Column("a node", Unit.COUNT), Column("bandwidth per device")]
    table = Table("topologies", "", tuple(columns))
    for topology in found:
        links = (f"{link.name} {format_rate(link.bandwidth)}" for link in topology.levels)
        device = topology.device
        table.add(
            topology.name,
            device.name,
            device.memory,
            format_flops(device.peak("bfloat16")),
            topology.devices_per_node,
            ", ".join(links),
        )
    return table
