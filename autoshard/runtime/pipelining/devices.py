"""The devices of pipeline stages: a mesh for each stage, and a group for messages between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.plan import Plan, Stage
from autoshard.runtime.process_groups import make_groups
from autoshard.torch_private import mesh_of_other_ranks


@dataclass(frozen=True)
class StageDevices:
    """The devices of all stages, as this rank sees them.

    Attributes:
        whole: all devices.
        meshes: the devices of each stage, with the stage's axes.
        ranks: global ranks of each stage's devices, row-major.
        positions: the stages of each pipeline rank.
        position: number of this process's pipeline rank.
        group: all devices, for messages between stages.
        gradient_group: all devices, for gradients sent back: messages of the two directions do
            not wait for each other.
    """

    whole: DeviceMesh
    meshes: tuple[DeviceMesh, ...]
    ranks: tuple[tuple[int, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    position: int
    group: ProcessGroup
    gradient_group: ProcessGroup

    @classmethod
    def of(
        cls, plan: Plan, mesh: DeviceMesh, known: "StageDevices | None" = None
    ) -> "StageDevices":
        """Create the meshes and the group; all ranks of the mesh must call it.

        If these are all ranks of the job, every rank makes the groups of every stage. Otherwise
        the other ranks know nothing of them, and each group is made by its own ranks.

        A plan whose stages have one device each also runs in one process, which then has all
        stages.

        Args:
            plan: with several stages.
            mesh: the devices of the plan; this rank is one of them.
            known: devices of another plan, with meshes that can be used and the group.

        Raises:
            PlanError: the mesh does not have the plan's axes, or is a part of a job whose
                communicators are split from that of all ranks.
        """
        assert plan.pipeline is not None
        devices: list[int] = mesh.mesh.flatten().tolist()
        sizes = [prod(size for _, size in stage.axes) for stage in plan.stages]
        alone = len(devices) == 1 and plan.mesh.num_devices > 1 and set(sizes) == {1}
        if not alone:
            _check_axes(plan, mesh)
        first = [0 if alone else stage.first_device for stage in plan.stages]
        ranks = tuple(
            tuple(devices[start : start + size]) for start, size in zip(first, sizes, strict=True)
        )
        is_part = len(devices) < dist.get_world_size()
        if is_part:
            _check_can_be_part(len(devices))
        # Names of groups count those that a rank has: first those that all ranks of the mesh make.
        group = known.group if known else _message_group(devices, is_part=is_part)
        back = known.gradient_group if known else _message_group(devices, is_part=is_part)
        made: dict[object, DeviceMesh] = {}
        if known is not None:
            made.update(
                ((own, _axes(one)), one) for own, one in zip(known.ranks, known.meshes, strict=True)
            )
        for stage, own in zip(plan.stages, ranks, strict=True):
            if (own, stage.axes) not in made:
                make = _part_mesh if is_part else _stage_mesh
                made[own, stage.axes] = make(stage, own, mesh.device_type)
        for stage, own in zip(plan.stages, ranks, strict=True):
            if is_part and dist.get_rank() not in own:
                continue
            for axis in _joint_axes(stage):
                make_groups(made[own, stage.axes], axis, is_part=is_part)
        positions = (tuple(range(len(sizes))),) if alone else plan.pipeline.ranks
        return cls(
            whole=mesh,
            meshes=tuple(made[o, s.axes] for s, o in zip(plan.stages, ranks, strict=True)),
            ranks=ranks,
            positions=positions,
            position=_position(positions, ranks),
            group=group,
            gradient_group=back,
        )

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Numbers of the stages that this rank runs."""
        return self.positions[self.position]


def _joint_axes(stage: Stage) -> list[str]:
    """The joined names of axes that communicate as one group in a stage."""
    sizes = dict(stage.axes)
    steps = (step for resharding in stage.reshardings for step in resharding.steps)
    joint = {step.axis for step in steps if len(step.axes) > 1 and step.num_ranks(sizes) > 1}
    return sorted(joint)


def _axes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    return tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _message_group(devices: list[int], *, is_part: bool) -> ProcessGroup:
    group = _group(devices, is_part=is_part)
    # The first message of a group must not be one that some ranks take no part in.
    dist.barrier(group)
    return group


def _check_axes(plan: Plan, mesh: DeviceMesh) -> None:
    names, sizes = plan.mesh.axis_names, plan.mesh.axis_sizes
    if mesh.mesh_dim_names != names or tuple(mesh.shape) != sizes:
        raise PlanError(
            f"the plan is for a mesh with the axis names {names} and the sizes {sizes}; this one "
            f"has the axis names {mesh.mesh_dim_names} and the shape {tuple(mesh.shape)}: create "
            f"it with init_device_mesh({mesh.device_type!r}, {sizes}, mesh_dim_names={names})"
        )


def _stage_mesh(stage: Stage, ranks: Sequence[int], device_type: str) -> DeviceMesh:
    names, sizes = zip(*stage.axes, strict=True)
    return DeviceMesh(device_type, torch.tensor(ranks).reshape(sizes), mesh_dim_names=names)


def _part_mesh(stage: Stage, ranks: Sequence[int], device_type: str) -> DeviceMesh:
    """The mesh of a stage whose groups its own ranks make, without the other ranks of the job."""
    names, sizes = zip(*stage.axes, strict=True)
    devices = torch.tensor(ranks).reshape(sizes)
    if dist.get_rank() not in ranks:
        return mesh_of_other_ranks(device_type, devices, names)
    groups = []
    for dim, size in enumerate(sizes):
        rows = devices.movedim(dim, -1).reshape(-1, size).tolist()
        groups.append(_group(next(row for row in rows if dist.get_rank() in row), is_part=True))
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=devices, mesh_dim_names=names)


def _group(ranks: list[int], *, is_part: bool) -> ProcessGroup:
    group = dist.new_group(ranks, group_desc="pipeline stages", use_local_synchronization=is_part)
    assert isinstance(group, ProcessGroup)
    return group


def _check_can_be_part(number: int) -> None:
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise PlanError(
            f"the device mesh has {number} of the {dist.get_world_size()} ranks, and after "
            f"`init_process_group(device_id=...)` only all of them can make the groups of pipeline "
            f"stages; leave `device_id` out, or start a job of its own"
        )


def _position(positions: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]]) -> int:
    """The number of this process's pipeline rank."""
    own = dist.get_rank()
    found = [n for n, stages in enumerate(positions) if all(own in ranks[s] for s in stages)]
    if len(found) != 1:
        raise PlanError(
            f"rank {own} has the stages of {len(found)} pipeline ranks; the stages of each must "
            f"have the same devices, and no other stage has them"
        )
    return found[0]
