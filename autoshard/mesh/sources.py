"""Meshes in the forms in which callers have them."""

import os
import sys
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from autoshard.errors import ArgumentTypeError
from autoshard.mesh.build import make_mesh
from autoshard.mesh.mesh import Mesh
from autoshard.mesh.presets import DEFAULT_CPU_TOPOLOGY, list_topologies
from autoshard.mesh.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshLike: TypeAlias = "Mesh | DeviceMesh | str | int | Sequence[int]"
"""A mesh; a DeviceMesh, whose devices say the topology; a number of devices; or the size of each
axis, `(2, 4)`, `"2x4"` or `"dp=2,tp=4"`."""


def to_mesh(source: MeshLike, *, topology: str | Topology | None = None) -> Mesh:
    """The mesh of what a caller passed.

    Args:
        source: a mesh in one of the forms of `MeshLike`.
        topology: name of a preset, or a topology. By default that of the devices of a DeviceMesh,
            or that of `make_mesh`. A Mesh has its own.

    Raises:
        ArgumentTypeError: it is none of these; the message says what to pass.
        MeshError: it is invalid.
    """
    if isinstance(source, Mesh):
        return source
    if _is_device_mesh(source):
        sizes, names = tuple(source.mesh.shape), source.mesh_dim_names
        topology = _topology_of(source.device_type) if topology is None else topology
        per_node = _devices_per_node(source)
        return make_mesh(sizes, axes=names, topology=topology, gpus_per_node=per_node)
    if isinstance(source, str):
        return make_mesh(source, topology=topology)
    return make_mesh(mesh_sizes(source), topology=topology)


def mesh_sizes(source: object) -> tuple[int, ...]:
    """The size of each axis, of a sequence of them or of one number of devices.

    Raises:
        ArgumentTypeError: it is neither.
    """
    try:
        if isinstance(source, Sequence):
            return tuple(index(size) for size in source)
        return (index(source),)  # type: ignore[arg-type]  # it raises TypeError where it is not
    except TypeError:
        raise ArgumentTypeError(
            f"{source!r:.80} is passed in place of a mesh: pass a Mesh of make_mesh, a DeviceMesh, "
            f"or the size of each axis, such as (2, 4) or 'dp=2,tp=4'"
        ) from None


def _is_device_mesh(source: object) -> "TypeGuard[DeviceMesh]":
    # Who has such an object has imported torch.
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(source, module.DeviceMesh)


def _topology_of(device_type: str) -> str | None:
    """The preset of the devices of this process; None, the default, if there is none."""
    if device_type == "cpu":
        return DEFAULT_CPU_TOPOLOGY
    torch = sys.modules["torch"]
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    return preset_of_device(torch.cuda.get_device_name())


def preset_of_device(name: str) -> str | None:
    """The preset of a GPU by the name that its driver reports; None if there is none.

    Example:
        >>> preset_of_device("NVIDIA H100 80GB HBM3")
        'h100-sxm'
        >>> preset_of_device("NVIDIA A100-PCIE-40GB")
    """
    words = set(name.lower().replace("-", " ").split())
    kind = "pcie" if words & {"pcie", "l40s"} else "sxm"
    matches = [
        preset
        for preset in list_topologies()
        if (parts := preset.split("-"))[0] in words
        and not {kind, "nvl72", "oam"}.isdisjoint(parts)
        and (len(parts) < 3 or parts[2] in words)  # noqa: PLR2004  the memory
    ]
    return matches[0] if len(matches) == 1 else None


def _devices_per_node(mesh: "DeviceMesh") -> int | None:
    """Ranks on this host, as torchrun says, where the mesh has more; None if unknown."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if mesh.device_type == "cpu" or not local.isdecimal():
        return None
    return int(local) if 0 < int(local) < mesh.size() else None
