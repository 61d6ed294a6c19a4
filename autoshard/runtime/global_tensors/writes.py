"""Writes into global tensors: on the shards where these have all that is written, else gathered."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.runtime.global_tensors.letters import broadcast
from autoshard.runtime.global_tensors.on_shards import Letters, ShardedCall, TorchCall
from autoshard.runtime.global_tensors.origins import is_used, root_of
from autoshard.runtime.global_tensors.placed import Placed, Shape
from autoshard.runtime.global_tensors.rules import attribute_of, is_elementwise_write
from autoshard.runtime.global_tensors.views import index
from autoshard.torch_private import saves_result

_READS = ("__index__", "__int__", "__invert__")


def writes(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """True for functions that write into an argument, by their name or because of `out`."""
    name = getattr(function, "__name__", "")
    if name == "__set__":
        return attribute_of(function) == "data"
    special = name.startswith("__")
    by_name = name.startswith("__i") and name not in _READS if special else name.endswith("_")
    return by_name or name == "__setitem__" or kwargs.get("out") is not None


def has_inplace(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """True if a call says that its result replaces its first argument, as `relu(x, True)`."""
    place = _place_of_inplace(function)
    if place is None:
        return False
    return bool(args[place] if place < len(args) else kwargs.get("inplace", False))


@cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    """The position of a parameter `inplace`."""
    try:
        names = list(signature(function).parameters)
    except (TypeError, ValueError):  # written in C
        return None
    return names.index("inplace") if "inplace" in names else None


def without_inplace(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that returns a new tensor."""
    place = _place_of_inplace(function)
    kept = [False if n == place else x for n, x in enumerate(args)]
    return tuple(kept), {name: x for name, x in kwargs.items() if name != "inplace"}


def check_writable(target: DTensor) -> None:
    """Refuse what autograd refuses of a tensor on one device.

    Raises:
        RuntimeError: the target is a leaf that requires a gradient, or a view of one.
    """
    if not (torch.is_grad_enabled() and target.requires_grad):
        return
    root = root_of(target)
    if root.is_leaf and root.requires_grad:
        what = "a leaf Variable" if root is target else "a view of a leaf Variable"
        raise RuntimeError(f"{what} that requires grad is being used in an in-place operation.")


def check_unsaved(target: DTensor) -> None:
    """Refuse a write that autograd does not see into what it may have saved for backward.

    One device computes gradients from what is written, or raises in backward. A global tensor
    gets new contents, and autograd would compute from the old ones.

    Raises:
        PlanError: the write goes through `.data` or `detach()`, or gradients are off, and the
            tensor has been used, or the function that computed it needs its result in backward.
    """
    root = root_of(target)
    is_seen = torch.is_grad_enabled() and target.requires_grad
    if root.is_leaf or not root.requires_grad or is_seen:
        return
    if is_used(root) or saves_result(root.grad_fn):
        raise PlanError(
            f"a write through .data or detach(), or without gradients, into a tensor of shape "
            f"{tuple(root.shape)} that autograd may have saved for backward: gradients would be "
            f"those of what was there before. Write into a copy, t = t.clone(), or take "
            f"torch.where(mask, value, t)"
        )


def write_on_shards(call: TorchCall) -> ShardedCall | None:
    """The new contents of the first argument; None if ranks lack something of what is written."""
    target = call.args[0] if call.args else None
    if not isinstance(target, Placed) or not target.is_sharded:
        return None
    if call.function.__name__ == "__setitem__":
        return _item(call, target)
    if not is_elementwise_write(call.function):
        return None
    found = broadcast(call.tensors)
    if found is None or found[0] != target.shape:
        return None
    return _into(call, target, found[1], call.compute)


def _item(call: TorchCall, target: Placed) -> ShardedCall | None:
    """The contents after `target[...] = value`, if no sharded dim is indexed."""
    _, entries, value = call.args
    if isinstance(entries, Placed) and entries.local.dtype is torch.bool:
        # A number where a mask is true: ranks need no element of others.
        scalar = not isinstance(value, Placed) or not value.shape
        if entries.shape != target.shape or not scalar:
            return None
        found = broadcast(call.tensors)
        return found and _into(call, target, found[1], partial(_assign, call))
    read = index(TorchCall(torch.Tensor.__getitem__, (target, entries), {}))
    if read is None:
        return None
    place = next(n for n, x in enumerate(read.tensors) if x is target)
    lettered = [dim for dim, x in enumerate(read.letters[place]) if x is not None]
    if any(t.is_shard and t.dim not in lettered for t in target.layout.types):
        return None
    letters = {id(x): one for x, one in zip(read.tensors, read.letters, strict=True)}
    if isinstance(value, Placed):
        shape, of_item = _item_of(read)
        if len(value.shape) > len(shape):
            return None
        missing = len(shape) - len(value.shape)
        letters[id(value)] = tuple(
            of_item[missing + n] if size == shape[missing + n] else None
            for n, size in enumerate(value.shape)
        )
    ordered = [letters[id(x)] for x in call.tensors]
    return _into(call, target, ordered, partial(_assign, call))


def _item_of(read: ShardedCall) -> tuple[Shape, Letters]:
    """Shape and letters of what an index selects."""
    whole = [torch.empty(x.shape, dtype=x.local.dtype, device="meta") for x in read.tensors]
    item = read.compute(whole)
    return tuple(item.shape), read.results(0, item)


def _assign(call: TorchCall, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run `target[...] = value` on a rank's parts."""
    call.compute(locals_)
    return next(x for x, t in zip(locals_, call.tensors, strict=True) if t is call.args[0])


def _into(
    call: TorchCall,
    target: Placed,
    letters: Sequence[Letters],
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor],
) -> ShardedCall:
    """A write into a copy of the target, whose layout decides that of the other tensors."""
    place = next(n for n, x in enumerate(call.tensors) if x is target)

    def on_copy(locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        return compute([x.clone() if n == place else x for n, x in enumerate(locals_)])

    return ShardedCall(call.tensors, letters, on_copy, lambda *_: letters[place], leader=place)
