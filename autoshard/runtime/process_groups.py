"""Process groups of one mesh axis, and of several axes that communicate as one group."""

from collections.abc import Sequence
from itertools import combinations
from math import prod

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.mesh import join_axes, split_axes

_Ranks = tuple[tuple[int, ...], ...]
_MADE: dict[_Ranks, tuple[ProcessGroup | None, ProcessGroup | None]] = {}
"""The default group when groups of these ranks were made, and the one that has this rank, if any.

They are never dropped, so that all ranks know the same ones and make others in the same order.
"""


def process_group(mesh: DeviceMesh, axis: str) -> ProcessGroup:
    """The process group of an axis, or of several that `join_axes` joined.

    The groups of several axes are made at their first use, which must be that of all ranks of the
    mesh; rank r of a group is the r-th in the row-major order of the axes.

    Args:
        mesh: its mesh dim names are the names of axes.
        axis: the axis of a planned step.

    Raises:
        PlanError: the mesh has no such axis, or ranks that do not ascend along the axes; or it is
            a part of a job whose communicators are split from that of all ranks.
    """
    axes, names = split_axes(axis), mesh.mesh_dim_names or ()
    for name in axes:
        if name not in names:
            raise PlanError(f"a step is on the axis {name!r}; the mesh has {list(names)}")
    if len(axes) == 1:
        return mesh.get_group(axis)
    ranks = _ranks_of_groups(mesh, axes)
    make_groups(mesh, axis, is_part=mesh.size() < dist.get_world_size())
    group = _MADE[ranks][1]
    if group is None:
        raise PlanError("this rank is not part of the device mesh")
    return group


def make_groups(mesh: DeviceMesh, axis: str, *, is_part: bool = False) -> None:
    """Make the groups of several axes, unless there are such; all ranks of the job must call it.

    Args:
        mesh: a mesh, which may be that of a pipeline stage without this rank.
        axis: names that `join_axes` joined.
        is_part: only the ranks of the mesh call it, of which this one is.

    Raises:
        PlanError: as `process_group`.
    """
    ranks = _ranks_of_groups(mesh, split_axes(axis))
    if _is_made(ranks):
        return
    for group in ranks:
        if list(group) != sorted(group):
            raise PlanError(
                f"the axes {axis} communicate as one group, whose ranks must ascend, but those of "
                f"the mesh are {list(group)}; use a mesh as `init_device_mesh` makes it"
            )
    if is_part and dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise PlanError(
            f"the axes {axis} communicate as one group, but the mesh has {mesh.size()} of the "
            f"{dist.get_world_size()} ranks, and after `init_process_group(device_id=...)` only "
            f"all of them can make a group; leave `device_id` out, or start a job of its own"
        )
    own = None
    for group in ranks:
        made = dist.new_group(list(group), group_desc=axis, use_local_synchronization=is_part)
        if isinstance(made, ProcessGroup):
            own = made
    _MADE[ranks] = dist.group.WORLD, own


def axes_of_group(mesh: DeviceMesh, group_name: str) -> str | None:
    """The joined names of the axes whose group has a name; None if there are none."""
    pairs = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
    names = [name for name, size in pairs if size > 1]
    for first, end in combinations(range(len(names) + 1), 2):
        ranks = _ranks_of_groups(mesh, names[first:end])
        group = _MADE[ranks][1] if _is_made(ranks) else None
        if group is not None and group.group_name == group_name:
            return join_axes(names[first:end])
    return None


def _is_made(ranks: _Ranks) -> bool:
    return ranks in _MADE and _MADE[ranks][0] is dist.group.WORLD


def _ranks_of_groups(mesh: DeviceMesh, axes: Sequence[str]) -> _Ranks:
    """The ranks of every group of some axes, in the row-major order of the mesh."""
    names = mesh.mesh_dim_names or ()
    inside = [names.index(name) for name in axes]
    outside = [axis for axis in range(mesh.ndim) if axis not in inside]
    size = prod(mesh.size(axis) for axis in inside)
    rows = mesh.mesh.permute(*outside, *inside).reshape(-1, size)
    return tuple(map(tuple, rows.tolist()))
