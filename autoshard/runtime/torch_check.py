"""Prepares the installed torch for planned models, and checks that it does what they rely on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autoshard.errors import TorchVersionError
from autoshard.runtime.checks.agreement import digest_of, numbers_of_all_ranks
from autoshard.runtime.global_tensors.dtensor_handlers import install_dtensor_handlers
from autoshard.runtime.recorder import not_recorded
from autoshard.torch_private import (
    TorchDispatchMode,
    check_parts,
    checks_of_dtensors,
    checks_of_pipelines,
    checks_of_tensors,
    leave_backward_uncompiled,
    operator_handlers,
    schema_of,
    stored_shard,
)


@cache
def prepare_torch(mesh: DeviceMesh) -> None:
    """Install the handlers of DTensors, and check the installed torch.

    Args:
        mesh: of a plan; all of its ranks must call it, and each mesh is checked once.

    Raises:
        TorchVersionError: torch does not do what the library relies on, or ranks have different
            versions.
    """
    install_dtensor_handlers(mesh)
    leave_backward_uncompiled()
    with not_recorded():
        # The first collective: where ranks cannot communicate, the error says so.
        _check_same_version(mesh)
        of_handlers = {_ASSIGNMENTS: _assigns_by_handled, **_checks_of_handlers(mesh)}
        check_parts({**checks_of_tensors(), **checks_of_dtensors(mesh), **of_handlers})


@cache
def prepare_pipelines(mesh: DeviceMesh) -> None:
    """Check that the installed torch runs stages as planned, as `prepare_torch` does for others.

    Raises:
        TorchVersionError: it does not.
    """
    prepare_torch(mesh)
    check_parts(checks_of_pipelines(mesh.get_group(0)))


def _check_same_version(mesh: DeviceMesh) -> None:
    found = numbers_of_all_ranks(
        torch.tensor([digest_of(torch.__version__)], device=mesh.device_type), mesh
    )
    if bool((found != found[0]).any()):
        raise TorchVersionError(
            f"the ranks have different versions of PyTorch, and this one has {torch.__version__}: "
            f"install one version on all nodes"
        )


def _checks_of_handlers(mesh: DeviceMesh) -> Mapping[str, Callable[[], bool]]:
    """Checks of the handlers of DTensors, by what they check; none on a mesh of one rank."""
    axis = next((axis for axis, size in enumerate(mesh.shape) if size > 1), None)
    if axis is None:
        return {}
    line = _Line(mesh, axis)
    return {
        "writes into rows of a sharded DTensor reach its shards": partial(_writes_arrive, line),
        "the number of a DTensor is that of all ranks": partial(_sums_numbers, line),
        "GradScaler sees infinite gradients of all ranks": partial(_unscales, line),
        "assigning the data of a DTensor replaces its shard": partial(_assigns_data, line),
    }


_ASSIGNMENTS = "assignments to parts of a DTensor are operators with a handler"


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """A context manager that collects the operators that write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.operators: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        if schema_of(func).is_mutable:
            self.operators.add(func)
        return func(*args, **(kwargs or {}))


def _assigns_by_handled() -> bool:
    weight = torch.zeros(3, 2)
    with _Written() as written:
        weight[0] = 3.0
        weight[0, 1] = 5.0
        weight[1] = weight[0]
        weight[weight.isnan()] = 0.0
        weight[weight.isnan().all(1)] = 0.0
        weight[[0, 2]] = 1.0
        weight[[0, 2]] = weight[:2] + 1
    return bool(written.operators) and written.operators <= operator_handlers().keys()


@dataclass(frozen=True, slots=True)
class _Line:
    """The ranks of a mesh along one axis.

    Attributes:
        mesh: the mesh.
        axis: the axis.
    """

    mesh: DeviceMesh
    axis: int

    @property
    def position(self) -> int:
        """Number of this rank."""
        return self.mesh.get_local_rank(self.axis)

    def dtensor(self, local: torch.Tensor, placement: Placement) -> DTensor:
        """A DTensor of this rank's part, with a placement along the axis."""
        placements = [placement if i == self.axis else Replicate() for i in range(self.mesh.ndim)]
        local = local.to(self.mesh.device_type, torch.float32)
        return DTensor.from_local(local, self.mesh, placements, run_check=False)


def _writes_arrive(line: _Line) -> bool:
    sharded = line.dtensor(torch.zeros(1, 2), Shard(0))
    sharded[1] = 3.0
    return stored_shard(sharded).tolist() == [[3.0 if line.position == 1 else 0.0] * 2]


def _sums_numbers(line: _Line) -> bool:
    total = line.dtensor(torch.ones(()), Partial())
    return total.item() == line.mesh.size(line.axis)


def _unscales(line: _Line) -> bool:
    return all(_unscales_with(line, infinite=number) for number in range(2))


def _unscales_with(line: _Line, infinite: int) -> bool:
    """Of the gradients that a rank has, one is infinite."""
    is_own = line.position == infinite
    whole = line.dtensor(torch.full((1,), 2.0), Replicate())
    sharded = line.dtensor(torch.full((1,), torch.inf if is_own else 2.0), Shard(0))
    found, scale = (line.dtensor(torch.full((1,), value), Replicate()) for value in (0.0, 0.5))
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_([whole, sharded], found, scale)
    return stored_shard(found).item() == 1 and (is_own or stored_shard(sharded).item() == 1)


def _assigns_data(line: _Line) -> bool:
    weight, other = (line.dtensor(torch.full((1,), value), Shard(0)) for value in (1.0, 2.0))
    weight.data = other
    return stored_shard(weight) is stored_shard(other)
