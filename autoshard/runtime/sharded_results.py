"""Results of forward that stay sharded: losses of them are those of the global tensor.

DTensor computes the mean of a loss as the mean of the means of the shards. That is another number
if labels are ignored in some shards only, or if the shards differ in size. It also refuses to
combine a DTensor with a plain tensor, such as labels from a data loader.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from autoshard.errors import PlanError
from autoshard.layouts import from_placements
from autoshard.runtime.dtensors import from_local
from autoshard.runtime.shards import local_shard
from autoshard.torch_private import pytree, stored_shard, without_torch_function

_CLASS_LOSSES = (functional.cross_entropy, functional.nll_loss)
"""Losses whose mean is over the labels that are not ignored, weighted by their class."""

_ELEMENT_LOSSES = (
    functional.binary_cross_entropy_with_logits,
    functional.huber_loss,
    functional.l1_loss,
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
)
"""Losses whose mean is over all elements."""


class ShardedResult(DTensor):
    """A result of forward that the plan leaves sharded, and that requires a gradient.

    Computes as a DTensor does, and so does what is computed from it, with three differences:

    * plain tensors of the global shape, or of the shape of the rank's shard, are sharded alike;
      labels of classes follow the other dims of the logits;
    * means of losses are those of the global tensor;
    * `to_local` is refused where gradients flow, since a mean over a rank's shard is not the mean
      over the global tensor, and its gradients are as many times too large as there are shards.
    """

    __slots__ = ()

    @classmethod
    def of(cls, tensor: DTensor) -> "ShardedResult":
        """The same tensor with these guards."""
        # A subclass of DTensor cannot be built around an existing autograd node.
        tensor.__class__ = cls
        assert isinstance(tensor, cls)
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; DTensors that it returns are guarded too."""
        kwargs = dict(kwargs or {})
        if _is_loss(func):
            return _Loss.of(func, args, kwargs).run()
        first = args[0] if args else None
        if isinstance(first, cls):
            args = (first, *(_sharded_like(x, first) for x in args[1:]))
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch
        return pytree.tree_map_only(lambda x: type(x) is DTensor, cls.of, result)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's shard.

        Raises:
            PlanError: gradients would flow through it, and `grad_placements` does not state which
                ones the caller computes.
        """
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


@cache
def _is_loss(func: Callable[..., Any]) -> bool:
    """True for functions that reduce what they compute, over shards as DTensor does it."""
    try:
        return "reduction" in signature(func).parameters
    except (TypeError, ValueError):  # written in C
        return False


def _sharded_like(value: Any, result: DTensor, *, labels: bool = False) -> Any:
    """A plain tensor as a DTensor that is sharded like a result, if it has its shape.

    Args:
        value: an argument of a function of torch; returned unchanged if it does not fit.
        result: the tensor that it is combined with.
        labels: True if the value has no dim for the classes, dim 1 of the result.
    """
    mesh = result.device_mesh
    coordinate = mesh.get_coordinate()
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or coordinate is None:
        return value
    dims = [dim for dim in range(result.ndim) if not (labels and dim == 1)]
    whole = tuple(result.shape[dim] for dim in dims)
    placements = _label_placements(result) if labels else result.placements
    if not whole or any(p.is_partial() for p in placements):
        return value
    if tuple(value.shape) == whole:
        sizes = tuple(mesh.shape)
        value = local_shard(value, from_placements(placements, sizes), sizes, coordinate)
        return from_local(value, mesh, placements, whole)
    local = stored_shard(result).shape
    if tuple(value.shape) == tuple(local[dim] for dim in dims):
        return from_local(value, mesh, placements, whole)
    return value


def _label_placements(logits: DTensor) -> tuple[Placement, ...]:
    """The placements of labels: those of logits without dim 1, the classes."""
    return tuple(
        p
        if not isinstance(p, Shard) or p.dim == 0
        else Replicate()
        if p.dim == 1
        else Shard(p.dim - 1)
        for p in logits.placements
    )


@dataclass(frozen=True, slots=True)
class _Loss:
    """A call of a loss.

    Attributes:
        function: of `torch.nn.functional`.
        arguments: by name.
    """

    function: Callable[..., torch.Tensor]
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        function: Callable[..., torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> "_Loss":
        """The loss, with a target that is sharded as the input is."""
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        source, target = arguments.get("input"), arguments.get("target")
        if isinstance(target, DTensor) and not isinstance(source, DTensor):
            source = arguments["input"] = _sharded_like(source, target)
        if isinstance(source, DTensor) and isinstance(target, torch.Tensor):
            labels = function in _CLASS_LOSSES and target.ndim == source.ndim - 1
            if isinstance(target, DTensor):
                wanted = _label_placements(source) if labels else source.placements
                arguments["target"] = target.redistribute(placements=wanted)
            else:
                arguments["target"] = _sharded_like(target, source, labels=labels)
        return cls(function, arguments)

    def run(self) -> torch.Tensor:
        """The loss of the global tensors.

        Raises:
            PlanError: its mean over shards is not known to be that of the global tensor, or the
                target has another shape.
        """
        tensors = (self.arguments.get("input"), self.arguments.get("target"))
        if not all(isinstance(tensor, DTensor) for tensor in tensors):
            shapes = " and ".join(str(tuple(x.shape)) for x in tensors if x is not None)
            raise self._refused(f"its tensors of shape {shapes} are not sharded alike")
        legacy = (self.arguments.get(name) for name in ("size_average", "reduce"))
        if any(value is not None for value in legacy):
            raise self._refused("size_average and reduce are not supported, reduction is")
        if self.arguments["reduction"] != "mean":
            return self._call(self.arguments)
        if self.function in _ELEMENT_LOSSES:
            return self._call({**self.arguments, "reduction": "sum"}) / self._source.numel()
        if self.function in _CLASS_LOSSES:
            return self._call({**self.arguments, "reduction": "sum"}) / self._count()
        raise self._refused("the mean over its shards need not be the global mean")

    def _refused(self, why: str) -> PlanError:
        return PlanError(
            f"{self.function.__name__} of a sharded result: {why}. Compute it from "
            f"autoshard.full_tensor(result), make it a part of forward, or use reduction='sum'"
        )

    @property
    def _source(self) -> DTensor:
        source = self.arguments["input"]
        assert isinstance(source, DTensor)
        return source

    def _count(self) -> torch.Tensor | int:
        """The sum of the weights of labels that are not ignored."""
        target, weight = self.arguments["target"], self.arguments["weight"]
        if target.is_floating_point():
            return self._source.numel() // self._source.shape[1]
        counted = target != self.arguments["ignore_index"]
        if weight is None:
            return _plain_sum(counted)
        labels = DTensor.to_local(target).clamp(min=0)
        local = weight[labels] * DTensor.to_local(counted)
        return _plain_sum(from_local(local, target.device_mesh, target.placements, target.shape))

    def _call(self, arguments: dict[str, Any]) -> torch.Tensor:
        weight = arguments.get("weight")
        if isinstance(weight, torch.Tensor) and not isinstance(weight, DTensor):
            mesh = self._source.device_mesh
            whole = [Replicate()] * mesh.ndim
            arguments = {**arguments, "weight": from_local(weight, mesh, whole, weight.shape)}
        with without_torch_function():
            result = self.function(**arguments)
        assert isinstance(result, DTensor)
        return ShardedResult.of(result)


def _plain_sum(tensor: DTensor) -> torch.Tensor:
    """The sum over all ranks as a plain scalar."""
    total = tensor.sum()
    assert isinstance(total, DTensor)
    whole: torch.Tensor = total.full_tensor()
    return whole
