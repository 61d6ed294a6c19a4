"""Running the steps of a conversion on local tensors.

Every pair of types in `autoshard.layouts.STEPS` is a function of the `spmd_types` package
with exactly the table's forward and backward, so nothing here talks to a process group
itself. It knows dims that are cut as one; where chunks of a dim are cut one by one, the slices
are put in the other order around it.
"""

from collections.abc import Callable, Sequence

import torch
from spmd_types import redistribute  # type: ignore[attr-defined]  # exported without __all__
from spmd_types import types as spmd
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.layouts import AxisType, Kind, parse_type
from autoshard.plan import PlannedStep

LocalFunction = Callable[[torch.Tensor], torch.Tensor]

_WHOLE = {Kind.INVARIANT: spmd.I, Kind.REPLICATE: spmd.R, Kind.PARTIAL: spmd.P}


def bind_steps(steps: Sequence[PlannedStep], mesh: DeviceMesh) -> tuple[LocalFunction, ...]:
    """The functions that run a conversion's steps on a rank's tensor, in order.

    A function is differentiable where its argument requires a gradient. Steps on axes of
    one rank change nothing and are left out.

    Args:
        steps: as a plan lists them.
        mesh: carries the process group of each axis by name.

    Raises:
        PlanError: a step is on an axis that the mesh does not have.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    for step in steps:
        if step.axis not in sizes:
            raise PlanError(f"a step is on the axis {step.axis!r}; the mesh has {list(sizes)}")
    return tuple(
        _bind(parse_type(step.source), parse_type(step.target), mesh.get_group(step.axis))
        for step in steps
        if sizes[step.axis] > 1
    )


def _bind(source: AxisType, target: AxisType, group: ProcessGroup) -> LocalFunction:
    before, after = _spmd_type(source), _spmd_type(target)
    num_ranks = group.size()

    def run(tensor: torch.Tensor) -> torch.Tensor:
        if target.chunks:
            tensor = by_rank(tensor, target, num_ranks)
        # Reductions of gradients run in the tensor's own dtype, as the plan counted them;
        # spmd_types wants to hear that where the dtype is narrower than float32.
        converted: torch.Tensor = redistribute(
            tensor.contiguous(),
            group,
            src=before,
            dst=after,
            backward_options={"op_dtype": tensor.dtype},
        )
        if converted.requires_grad:
            # The all-reduce of a gradient takes contiguous memory only, and autograd
            # hands over whatever it has, such as an expanded scalar.
            converted.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]  # torch
        return by_chunk(converted, source, num_ranks) if source.chunks else converted

    return run


def by_rank(tensor: torch.Tensor, cut: AxisType, num_ranks: int) -> torch.Tensor:
    """Chunks one after the other -> what is each rank's, one rank after the other."""
    dim = cut.dim
    unit = tensor.shape[dim] // sum(cut.chunks)
    chunks = torch.split(tensor, [unit * size for size in cut.chunks], dim)
    slices = [torch.unflatten(chunk, dim, (num_ranks, -1)) for chunk in chunks]
    return torch.cat(slices, dim + 1).flatten(dim, dim + 1)


def by_chunk(tensor: torch.Tensor, cut: AxisType, num_ranks: int) -> torch.Tensor:
    """What is each rank's, one rank after the other -> chunks one after the other."""
    dim = cut.dim
    unit = tensor.shape[dim] // (num_ranks * sum(cut.chunks))
    ranks = torch.unflatten(tensor, dim, (num_ranks, -1))
    slices = torch.split(ranks, [unit * size for size in cut.chunks], dim + 1)
    return torch.cat([chunk.flatten(dim, dim + 1) for chunk in slices], dim)


def _spmd_type(axis_type: AxisType) -> object:
    return spmd.S(axis_type.dim) if axis_type.is_shard else _WHOLE[axis_type.kind]
