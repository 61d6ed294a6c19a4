"""Handlers for operators on DTensors that PyTorch computes wrongly or refuses.

Training loops call these operators on parameters and gradients. PyTorch 2.13 returns the number
of one shard for `p.grad.norm().item()`, loses what is written into a slice of a sharded dim and
what is assigned to `p.data`, draws the same random numbers for all shards on a CPU, has no fused
SGD, cannot copy gradients that share memory, and makes `GradScaler` skip a step on some ranks only.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.runtime.call_checks import check_drawn_alike
from autoshard.runtime.dtensors import full_tensor, local_tensor, store_full
from autoshard.torch_private import operator_handlers, pytree, shares_memory, take_shard

_ATEN: Any = torch.ops.aten
_VIEWS = (
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default,
    _ATEN.unbind.int,
    _ATEN.diagonal.default,
    _ATEN.view.default,
)
"""Operators whose result is a view of a tensor, but a copy where they gather a sharded dim."""

_FUSED = (_ATEN._fused_sgd_.default, _ATEN._fused_adagrad_.default)
_INDEXED = (_ATEN.index_put_.default, _ATEN.index_fill_.int_Scalar, _ATEN.index_fill_.int_Tensor)
"""Operators that write at indices or where a mask is true, of any dim."""

_MASKED = (_ATEN.masked_fill_.Scalar, _ATEN.masked_fill_.Tensor)

_RANDOM = (
    _ATEN.normal_.default,
    _ATEN.uniform_.default,
    _ATEN.bernoulli_.float,
    _ATEN.randn_like.default,
    _ATEN.rand_like.default,
)
"""Operators that `torch.nn.init` and noise draw with."""

_UNSCALE = _ATEN._amp_foreach_non_finite_check_and_unscale_.default
_NUMBER = _ATEN._local_scalar_dense.default  # noqa: SLF001  an operator


FURTHER_GROUPS: list[Callable[[Sequence[torch.Tensor]], Sequence[ProcessGroup]]] = []
"""Functions that name further ranks with gradients of the same model as some gradients."""


def install_dtensor_handlers() -> None:
    """Register the handlers, once per process, for all DTensors."""
    handlers = operator_handlers()
    handlers[_UNSCALE] = _unscale
    handlers[_NUMBER] = _number
    handlers.update(dict.fromkeys(_FUSED, _elementwise))
    handlers.update(dict.fromkeys(_VIEWS, _view))
    handlers.update(dict.fromkeys(_INDEXED, _indexed))
    handlers.update(dict.fromkeys(_MASKED, _masked))
    handlers.update(dict.fromkeys(_RANDOM, _random))
    handlers[_ATEN.fill_.Tensor] = _fill
    handlers[_ATEN.fill_.Scalar] = _write
    handlers[_ATEN.copy_.default] = _write
    patched: Any = DTensor
    patched.__deepcopy__ = _deepcopy
    patched.data = property(_DATA.__get__, _set_data)


def _unhandled(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator as if it had no handler."""
    handlers = operator_handlers()
    handler = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = handler


def _unscale(_operator: object, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
    """Skip a step of `torch.amp.GradScaler` on all ranks if any has infinite gradients.

    DTensor reduces the flag over the axes that shard the first gradient only; here over the axes
    that shard any gradient.
    """
    gradients, found, scale = args
    _UNSCALE([local_tensor(gradient) for gradient in gradients], *map(local_tensor, (found, scale)))
    # All ranks have the gradients in the same order.
    groups = dict.fromkeys(
        gradient.device_mesh.get_group(axis)
        for gradient in gradients
        if isinstance(gradient, DTensor)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )
    for find in FURTHER_GROUPS:
        groups.update(dict.fromkeys(find(gradients)))
    for group in groups:
        dist.all_reduce(local_tensor(found), dist.ReduceOp.MAX, group)


def _number(_operator: object, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Any:
    """The number of `item()`, `float()` or `bool()`, the same on all ranks."""
    (tensor,) = args
    with torch.no_grad():
        # Of one element, so that the order of axes does not matter.
        return tensor.full_tensor().item()


def _elementwise(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a fused optimizer on local tensors: gradients are placed like their parameters."""
    lists = [one for one in args if isinstance(one, list | tuple) and one]
    for tensors in zip(*lists, strict=True):
        placements = {x.placements for x in tensors if isinstance(x, DTensor)}
        if len(placements) > 1:
            raise PlanError(
                f"{operator}: a parameter and its gradient are placed {placements}; "
                f"redistribute the gradient, or use foreach=True"
            )
    operator(*pytree.tree_map(local_tensor, args), **pytree.tree_map(local_tensor, dict(kwargs)))


class GatheredView(DTensor):
    """Result of an operator, instead of a view, if it had to gather a sharded dim.

    Writing into it writes into the tensor that it would be a view of, as `w[0].zero_()` does.

    Attributes:
        origin: that tensor, the operator, its other arguments, and the place in its results.
    """

    __slots__ = ()

    @classmethod
    def of(cls, view: DTensor, origin: "_Origin") -> None:
        """Make a DTensor a gathered view."""
        # A subclass of DTensor cannot be built around an existing tensor.
        view.__class__ = cls
        vars(view)["origin"] = origin

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, and write what it wrote."""
        result = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]  # torch
        if _writes(func) and args:
            for view in pytree.tree_leaves(args[0]):
                if isinstance(view, GatheredView):
                    _write_back(view)
        return result


_Origin = tuple[DTensor, Callable[[torch.Tensor], torch.Tensor]]


def _writes(func: Callable[..., Any]) -> bool:
    """True for functions of torch that write into their first argument, by name."""
    name = getattr(func, "__name__", "")
    special = name.startswith("__")
    return name.startswith("__i") and name not in _READS if special else name.endswith("_")


_READS = ("__index__", "__int__", "__invert__")


def _view(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Remember what a gathered view is a view of."""
    result = _unhandled(operator, args, kwargs)
    source = args[0]
    if type(source) not in (DTensor, GatheredView) or torch.compiler.is_compiling():
        return result
    single, own = isinstance(result, torch.Tensor), local_tensor(source)
    for number, view in enumerate((result,) if single else result):
        if isinstance(source, GatheredView) or not shares_memory(local_tensor(view), own):

            def again(full: torch.Tensor, number: int = number) -> torch.Tensor:
                found = operator(full, *args[1:], **kwargs)
                chosen: torch.Tensor = found if single else found[number]
                return chosen

            GatheredView.of(view, (source, again))
    return result


@torch.no_grad()
def _write_back(view: GatheredView) -> None:
    """Store the contents of a view in the tensor that it was gathered from."""
    source, again = vars(view)["origin"]
    _check_whole(source)
    full = full_tensor(source.detach()).clone()
    again(full).copy_(full_tensor(view.detach()))
    store_full(full, source)
    if isinstance(source, GatheredView):
        _write_back(source)


@torch.no_grad()
def _indexed(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write into the full tensor, and keep this rank's shard of it."""
    target = args[0]
    _check_whole(target)
    full = full_tensor(target).clone()
    operator(full, *full_tensor(args[1:]), **kwargs)
    store_full(full, target)
    if isinstance(target, GatheredView):
        _write_back(target)
    return target


def _masked(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write where a mask is true, as `w[mask] = 0.0` does since 2.15."""
    target, mask, *_ = args
    is_placed = isinstance(mask, DTensor) and not isinstance(target, GatheredView)
    return (_unhandled if is_placed else _indexed)(operator, args, kwargs)


def _random(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Draw the full tensor on the CPU, and keep this rank's shard of it.

    On a GPU DTensor itself shards the random numbers; on the CPU every shard would have the same.
    """
    target, *rest = args
    if target.device_mesh.device_type != "cpu":
        return _unhandled(operator, args, kwargs)
    check_drawn_alike(target.device_mesh)
    full = torch.empty(target.shape, dtype=target.dtype)
    drawn = operator(full, *rest, **kwargs)
    result: Any = target if drawn is full else torch.empty_like(target)
    store_full(drawn, result)
    if isinstance(result, GatheredView):
        _write_back(result)
    return result


def _fill(_operator: object, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Any:
    """Fill with a scalar tensor, as `w[0] = 3.0` does."""
    target, value = args
    _check_whole(target)
    local_tensor(target).fill_(value.item())
    if isinstance(target, GatheredView):
        _write_back(target)
    return target


def _check_whole(target: DTensor) -> None:
    """Refuse to write into a sum that is not computed yet."""
    if any(placement.is_partial() for placement in target.placements):
        raise PlanError(
            f"a DTensor that is placed {target.placements} cannot be written into: redistribute it"
        )


def _write(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write, also into a gathered view, as `w[0] = w[1]` does, and `w[0] = 3.0` since 2.15."""
    result = _unhandled(operator, args, kwargs)
    if isinstance(args[0], GatheredView):
        _write_back(args[0])
    return result


_DATA: Any = torch.Tensor.data


def _set_data(self: DTensor, value: torch.Tensor) -> None:
    """Assign `tensor.data`: torch replaces the shape and dtype of a DTensor, but not the shard."""
    _DATA.__set__(self, value)
    if isinstance(value, DTensor):
        take_shard(self, value)


_DEEPCOPY: Any = torch.Tensor.__deepcopy__


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    """Deep copy, also of gradients that share memory, as in a bucket.

    PyTorch takes the offset of the shard for the address of memory of the DTensor's own.
    """
    if id(self) in memo or not self.is_leaf or not self.storage_offset():
        return _DEEPCOPY(self, memo)
    copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
    copied.grad = deepcopy(self.grad, memo)
    vars(copied).update(deepcopy(vars(self), memo))
    return copied
