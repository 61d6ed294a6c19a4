"""Device meshes and the cost of communication; independent of graphs and layouts."""

from autoshard.mesh.build import make_mesh, resolve_topology
from autoshard.mesh.collectives import Span
from autoshard.mesh.mesh import (
    AlphaBeta,
    Axis,
    Mesh,
    mesh_from_json,
    mesh_text,
    mesh_to_json,
    topology_from_json,
    topology_to_json,
)
from autoshard.mesh.presets import DEFAULT_TOPOLOGY, generation_of, get_topology, list_topologies
from autoshard.mesh.shapes import default_axis_names, join_axes, parse_shape, split_axes
from autoshard.mesh.sources import MeshLike, mesh_sizes, preset_of_device, to_mesh
from autoshard.mesh.topology import (
    COLLECTIVES,
    AttentionRate,
    Bend,
    Device,
    KernelRates,
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
    "AttentionRate",
    "Axis",
    "Bend",
    "Device",
    "KernelRates",
    "Link",
    "Mesh",
    "MeshLike",
    "OperatorFit",
    "Rate",
    "RooflineFit",
    "Span",
    "Topology",
    "default_axis_names",
    "generation_of",
    "get_topology",
    "join_axes",
    "list_topologies",
    "make_mesh",
    "mesh_from_json",
    "mesh_sizes",
    "mesh_text",
    "mesh_to_json",
    "parse_shape",
    "preset_of_device",
    "resolve_topology",
    "split_axes",
    "to_mesh",
    "topology_from_json",
    "topology_to_json",
]
