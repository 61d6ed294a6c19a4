"""Private parts of `torch.distributed.tensor`."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autoshard.torch_private.versions import expected_of_torch

with expected_of_torch("classes in private modules of DTensor"):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["DTensorSpec"]

stored_shard: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""This rank's shard of a DTensor, as it is stored.

Relies on: operators in place, and optimizers, write into `_local_tensor`. The public `to_local` is
an autograd node, or a view.
"""

spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
"""Mesh, placements and global shape of a DTensor, as one object; another one where they differ.

Relies on: `_spec`. The public properties are made anew in each call.
"""


def operator_handlers() -> dict[Any, Callable[..., Any]]:
    """Functions that DTensors run in place of an operator; those that are added count at once.

    Relies on: for each operator with a DTensor, the dispatcher looks into this dict first, and
    calls `handler(operator, args, kwargs)`. `torch.distributed.tensor.parallel.loss_parallel` uses
    it so. The public `register_sharding` only chooses placements.
    """
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def dtensor_of(shard: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of a rank's shard, outside of autograd.

    Relies on: `DTensor.__new__` takes a shard and a specification, as DTensor's own dispatcher
    calls it. The public `from_local` is an autograd node, and ten times slower.
    """
    made: DTensor = DTensor.__new__(DTensor, shard, spec, requires_grad=False)
    return made


class DeferredShard(DTensor):
    """A DTensor whose shard is computed when it is first read; then it is an ordinary one.

    Relies on: everything, DTensor's dispatcher in C++ included, reads the attribute `_local_tensor`
    of a subclass by its name, and the class of a DTensor can be set. There is no public tensor
    whose memory is filled later.
    """

    __slots__ = ()

    @classmethod
    def deferred(cls, like: torch.Tensor, spec: DTensorSpec) -> Self:
        """Make one.

        Args:
            like: has the element type and the device.
            spec: mesh, placements and global shape.
        """
        made = dtensor_of(like, spec)
        made.__class__ = cls
        assert isinstance(made, cls)
        return made

    def compute_shard(self) -> torch.Tensor:
        """This rank's shard."""
        raise NotImplementedError

    @property
    def _local_tensor(self) -> torch.Tensor:
        shard = self._local_tensor = self.compute_shard()
        return shard

    @_local_tensor.setter
    def _local_tensor(self, shard: torch.Tensor) -> None:
        self.__class__ = DTensor  # type: ignore[assignment]  # its base
        self._local_tensor = shard


def take_shard(target: DTensor, source: DTensor) -> None:
    """Give a DTensor the shard and the specification of another one.

    Relies on: all of a DTensor but its autograd state is in these two attributes. Assigning the
    public `data` replaces neither of them.
    """
    target._local_tensor, target._spec = stored_shard(source), spec_of(source)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of shards that interleave: each rank has a part of each of several pieces.

    Relies on: `_StridedShard` splits a dim into `split_factor` pieces and each of these over the
    axis. FSDP makes it for weights that tensor parallelism shards; there is no public one. Until
    2.11 DTensor gathers it in another order.
    """
    return _StridedShard(dim, split_factor=split_factor)
