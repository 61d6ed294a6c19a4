"""`GlobalTensor`: a DTensor that computes what one device computes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autoshard.errors import LayoutError, PlanError
from autoshard.layouts import I, Layout, from_placements, to_placements
from autoshard.runtime.global_tensors.calls import TensorClass, of_placed, run
from autoshard.runtime.global_tensors.metadata import is_metadata
from autoshard.runtime.global_tensors.origins import fresh
from autoshard.runtime.global_tensors.placed import Placed
from autoshard.runtime.shards import local_shape
from autoshard.torch_private import (
    end_graph,
    not_compiled,
    not_traced,
    pytree,
    without_compiler,
)

_NOT_TRACED = (
    "what is computed from a sharded result is not compiled: leave fullgraph=True out of the "
    "torch.compile around it, make it a part of forward, or compute it from "
    "autoshard.full_tensor(result)"
)


@not_traced
class GlobalTensor(DTensor):
    """A tensor that ranks share, with the values and gradients that one device would have.

    It is what forward returns where the plan leaves a result sharded, what `shard_loader` yields,
    and what is computed from them. A plain tensor that it is combined with is the same whole
    tensor on all ranks, whatever its shape.

    * Functions with a rule (`rules.py`) run on the shards.
    * All others run on the full tensor on every rank: right, slower, and said once.
    * Writes reach the shards that have the elements, through any chain of views.
    * What is whole on every rank is returned as a plain tensor.
    * `to_local` is refused where gradients flow, since a mean over a rank's shard is not the mean
      over the global tensor, and its gradients are as many times too large as there are shards.
    """

    __slots__ = ()

    @classmethod
    def of(cls, tensor: DTensor) -> "GlobalTensor":
        """The same tensor with these guards."""
        # A subclass of DTensor cannot be built around an existing autograd node.
        tensor.__class__ = cls
        assert isinstance(tensor, cls)
        return tensor

    @classmethod
    def kind(cls) -> TensorClass:
        """The kind of the tensors that are computed from such a tensor."""
        return TensorClass(cls.of)

    @classmethod
    def shared(
        cls,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
    ) -> "GlobalTensor":
        """The tensor of which this rank has a part; gradients flow into the part."""
        layout = from_placements(tuple(placements), tuple(mesh.shape))
        tensor = of_placed(Placed(local, layout, tuple(shape), mesh), cls.kind())
        assert isinstance(tensor, cls)
        return tensor

    @classmethod
    @not_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, uncompiled."""
        end_graph(_NOT_TRACED)
        if is_metadata(func):
            result = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]  # torch
            return pytree.tree_map_only(lambda x: type(x) is DTensor, cls.of, result)
        return without_compiler(run, func, args, dict(kwargs or {}), cls.kind())

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's shard.

        Raises:
            PlanError: gradients would flow through it, and `grad_placements` does not state which
                ones the caller computes.
        """
        fresh(self)
        whole = all(placement.is_replicate() for placement in self.placements)
        unguarded = whole or not self.requires_grad or not torch.is_grad_enabled()
        if grad_placements is None and not unguarded:
            raise PlanError(
                f"to_local() of a result that is placed {list(self.placements)}: the mean of a "
                f"shard is not the global mean, and its gradients would be too large. Compute the "
                f"loss from the DTensor or from autoshard.full_tensor(result), or make it a part "
                f"of forward; to_local(grad_placements=...) takes the gradients of the shard as "
                f"they are"
            )
        local: torch.Tensor = super().to_local(grad_placements=grad_placements)
        return local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank; differentiable."""
        fresh(self)
        if grad_placements is not None:
            full: torch.Tensor = super().full_tensor(grad_placements=grad_placements)
            return full
        return Placed.of(self).full()

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> "GlobalTensor":
        """The tensor in another layout; differentiable."""
        fresh(self)
        if device_mesh in (None, self.device_mesh) and placements is not None and not options:
            try:
                layout = from_placements(tuple(placements), tuple(self.device_mesh.shape))
            except LayoutError:
                layout = None
            if layout is not None and not layout.is_partial:
                part = Placed.of(self).resharded(layout)
                return self.shared(part.local, part.mesh, part.placements, part.shape)
        moved = super().redistribute(device_mesh, placements, **options)
        return GlobalTensor.of(moved)


@not_traced
class StateTensor(GlobalTensor):
    """A gathered view of a parameter, a gradient or an optimizer's state, or computed from one.

    All that is computed from it is a DTensor, since PyTorch combines parameters with these only.
    """

    __slots__ = ()

    @classmethod
    def kind(cls) -> TensorClass:
        """The kind of the tensors that are computed from such a tensor."""
        return TensorClass(cls.of, stays_shared=True)


def local(tensor: torch.Tensor, like: DTensor) -> GlobalTensor:
    """Say that a tensor is this rank's part of a global tensor, sharded as another one is.

    A plain tensor that meets a sharded result is the same whole tensor on all ranks. What each
    rank has of its own, such as the labels of its rows, is stated with this function.

    Args:
        tensor: this rank's part; its dims are the first ones of `like`.
        like: a sharded result, such as logits.

    Returns:
        The global tensor; its gradients are those of the part.

    Raises:
        PlanError: the tensor does not have the sizes of this rank's part.

    Example:
        >>> logits = model(ids)  # placed [Shard(0)]
        >>> loss = cross_entropy(logits, autoshard.local(own_labels, like=logits))
    """
    mesh, sizes = like.device_mesh, tuple(like.device_mesh.shape)
    num_dims = tensor.ndim
    layout = Placed.of(like).layout
    types = tuple(t if t.is_shard and t.dim < num_dims else I for t in layout.types)
    nesting = tuple(axes for axes in layout.nesting if types[axes[0]].is_shard)
    part = Layout(types, nesting)
    sharded = {t.dim for t in types if t.is_shard}
    whole = (like.shape[dim] if dim in sharded else n for dim, n in enumerate(tensor.shape))
    shape = tuple(whole)
    expected = local_shape(shape, part, sizes, mesh.get_coordinate() or ())
    if tuple(tensor.shape) != expected:
        raise PlanError(
            f"a tensor of shape {tuple(tensor.shape)} is not this rank's part of one that is "
            f"sharded like a result of shape {tuple(like.shape)}, placed {list(like.placements)}: "
            f"that has shape {expected}. DTensor.from_local(tensor, mesh, placements) takes other "
            f"parts"
        )
    return GlobalTensor.shared(tensor, mesh, to_placements(part, sizes), shape)
