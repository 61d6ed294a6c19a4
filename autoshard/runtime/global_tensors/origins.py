"""Views of tensors that ranks share: what they were made from, so that writes reach it.

A rank's copy of a view shares no memory with the shards, so a view is a function of its base: a
write into it writes into the base, and it is computed again after the base has changed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime.global_tensors.placed import Placed
from autoshard.torch_private import pytree, take_shard, version_counter, without_torch_function

_ORIGIN, _WRITES = "_autoshard_origin", "_autoshard_num_writes"
"""Attributes of tensors: where a view comes from, and how often a tensor was replaced."""

_USED = "_autoshard_used"
"""Attribute of tensors from which others were computed, with a history."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A call that makes a view, to be repeated on other contents of its base.

    Attributes:
        function: of torch.
        args: its arguments.
        kwargs: likewise.
        place: index of the base among the leaves of the arguments.
        number: index of the view among the tensors of the result.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    place: int
    number: int

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """The view of a tensor like the base; further tensors are whole if that one is."""
        leaves, spec = pytree.tree_flatten((tuple(self.args), dict(self.kwargs)))
        leaves[self.place] = base
        if base.is_meta:
            leaves = [without_memory(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        elif not isinstance(base, DTensor):
            leaves = [Placed.of(x).full() if isinstance(x, DTensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        view: torch.Tensor = pytree.tree_leaves(self.function(*args, **kwargs))[self.number]
        return view


@dataclass(slots=True)
class ViewOrigin:
    """Where a view comes from.

    Attributes:
        base: the tensor that it is a view of.
        replay: makes the view from the base.
        seen: the state of the contents of the base when the view was computed.
    """

    base: DTensor
    replay: Replay
    seen: tuple[int, int]


def origin_of(tensor: torch.Tensor) -> ViewOrigin | None:
    """Where a view comes from; None for a tensor of its own."""
    origin: ViewOrigin | None = vars(tensor).get(_ORIGIN)
    return origin


def root_of(tensor: DTensor) -> DTensor:
    """The tensor that a view is a view of, or the tensor itself."""
    while (origin := origin_of(tensor)) is not None:
        tensor = origin.base
    return tensor


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the shape and the strides which one device would have.

    Those of this rank's part do not tell: of a single row, each order of the dims is contiguous.
    What is no view is taken for contiguous.
    """
    origin = origin_of(tensor)
    if origin is not None:
        return origin.replay.on(without_memory(origin.base))
    if isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().to("meta")


def set_origin(view: DTensor, base: DTensor, replay: Replay) -> None:
    """Make a tensor a view of another one."""
    vars(view)[_ORIGIN] = ViewOrigin(base, replay, _contents(base))


def _contents(tensor: DTensor) -> tuple[int, int]:
    """Numbers that change when the contents of a tensor, or of what it is a view of, do."""
    tensor = root_of(tensor)
    return version_counter(tensor), vars(tensor).get(_WRITES, 0)


def note_use(tensors: Iterable[DTensor], result: Any) -> None:
    """Note of what tensors are views of that autograd may have saved them for a result."""
    if not torch.is_grad_enabled():
        return
    for new in pytree.tree_leaves(result):
        if isinstance(new, torch.Tensor) and new.requires_grad and origin_of(new) is None:
            for tensor in tensors:
                vars(root_of(tensor))[_USED] = True
            return


def is_used(tensor: DTensor) -> bool:
    """True if a tensor was an argument of what has a history."""
    return _USED in vars(tensor)


def fresh(tensor: DTensor) -> None:
    """Compute a view again if its base has changed since."""
    origin = origin_of(tensor)
    if origin is None or origin.seen == _contents(origin.base):
        return
    fresh(origin.base)
    replace_contents(tensor, origin.replay.on(origin.base))
    origin.seen = _contents(origin.base)


def replace_contents(tensor: DTensor, new: torch.Tensor) -> None:
    """Give a tensor other contents, with the history of these; its memory is left as it is.

    Autograd may have saved the former contents for backward.
    """
    assert isinstance(new, DTensor)
    follows = torch.is_grad_enabled() and (new.requires_grad or tensor.requires_grad)
    if follows and not (tensor.is_leaf and tensor.requires_grad):
        _REPLACED.append(tensor)
        try:
            with without_torch_function():
                tensor.copy_(new)
        finally:
            _REPLACED.pop()
    else:
        take_shard(tensor, new)
    count_write(tensor)


def count_write(tensor: DTensor) -> None:
    """Make views of a tensor compute their contents again before they are used."""
    vars(tensor)[_WRITES] = vars(tensor).get(_WRITES, 0) + 1


_REPLACED: list[DTensor] = []
"""The tensors that get other contents now."""


def is_replaced(tensor: DTensor) -> bool:
    """True while a tensor gets other contents: the operator `copy_` shall not copy them."""
    return any(one is tensor for one in _REPLACED)
