"""Sub-meshes of pipeline stages: consecutive devices of a mesh, with what is left of its axes."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from autoshard.errors import OptionError
from autoshard.mesh import Axis, Mesh
from autoshard.plan.stage import Stage

PIPELINE_AXIS = "pp"
"""Name of the outermost axis of a mesh whose size is the number of pipeline ranks."""


def num_pipeline_ranks(mesh: Mesh) -> int | None:
    """Number of pipeline ranks that a mesh asks for by the name of its outermost axis."""
    axis = mesh.axes[0]
    return axis.size if axis.name == PIPELINE_AXIS else None


def sub_mesh(mesh: Mesh, devices: int) -> Mesh:
    """The mesh of a stage: the outermost axes of the whole mesh are cut.

    Args:
        mesh: the whole mesh.
        devices: number of devices of the stage.

    Returns:
        A mesh with the innermost axes of the whole one, of which the first may be shorter. A stage
        on one device keeps the innermost axis, with size 1.

    Raises:
        OptionError: the number is not a product of the sizes of inner axes and a divisor of the
            size of the next one.

    Example:
        On a mesh of 8 x 8, stages of 16 devices have the mesh 2 x 8, stages of 4 the mesh 4.
    """
    axes: list[Axis] = []
    left = devices
    for axis in reversed(mesh.axes):
        size = min(axis.size, left)
        if left % size or axis.size % size:
            break
        left //= size
        if size > 1 or not axes:
            axes.insert(0, replace(axis, size=size))
        if left == 1:
            break
    if left != 1:
        sizes = " x ".join(str(size) for size in mesh.axis_sizes)
        raise OptionError(
            f"a stage cannot have {devices} devices of the mesh {sizes}: the outermost axes are "
            f"cut, so it must be one of {', '.join(map(str, sub_mesh_sizes(mesh)))}"
        )
    return replace(mesh, axes=tuple(axes))


def sub_mesh_sizes(mesh: Mesh) -> tuple[int, ...]:
    """Numbers of devices that a stage may have, ascending."""
    return tuple(sorted(set(_sizes(mesh))))


def _sizes(mesh: Mesh) -> Iterator[int]:
    inner = 1
    for axis in reversed(mesh.axes):
        yield from (inner * d for d in range(1, axis.size + 1) if axis.size % d == 0)
        inner *= axis.size


def is_aligned(mesh: Mesh, offset: int, devices: int) -> bool:
    """True if a stage may begin at a device: its sub-mesh then is a block of the whole mesh."""
    return offset % devices == 0 and offset + devices <= prod(mesh.axis_sizes)


def stage_devices(stage: Stage) -> range:
    """Numbers of a stage's devices."""
    size = prod(size for _, size in stage.axes)
    return range(stage.first_device, stage.first_device + size)


def stage_mesh(mesh: Mesh, stage: Stage) -> Mesh:
    """The mesh of a stage's devices.

    Args:
        mesh: the mesh of the whole plan.
        stage: one of its stages.

    Raises:
        OptionError: the stage's devices are not a part of the mesh.
    """
    return sub_mesh(mesh, len(stage_devices(stage)))
