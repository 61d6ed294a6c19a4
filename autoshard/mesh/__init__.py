"""Device meshes and the cost of communication; independent of graphs and layouts."""

from autoshard.mesh.mesh import (
    AlphaBeta,
    Axis,
    Mesh,
    Span,
    make_mesh,
    mesh_from_json,
    mesh_to_json,
    topology_from_json,
    topology_to_json,
)
from autoshard.mesh.presets import DEFAULT_TOPOLOGY, get_topology, list_topologies
from autoshard.mesh.topology import (
    COLLECTIVES,
    Bend,
    Device,
    Link,
    OperatorFit,
    Rate,
    RooflineFit,
    Topology,
)

__all__ = [
    "COLLECTIVES",
    "DEFAULT_TOPOLOGY",
    "AlphaBeta",
    "Axis",
    "Bend",
    "Device",
    "Link",
    "Mesh",
    "OperatorFit",
    "Rate",
    "RooflineFit",
    "Span",
    "Topology",
    "get_topology",
    "list_topologies",
    "make_mesh",
    "mesh_from_json",
    "mesh_to_json",
    "topology_from_json",
    "topology_to_json",
]
