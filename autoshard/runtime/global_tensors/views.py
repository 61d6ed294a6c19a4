"""Views, and functions that join or index tensors: dims that they leave alone stay sharded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.runtime.global_tensors.letters import dims_of, numbered
from autoshard.runtime.global_tensors.on_shards import Letters, Rule, ShardedCall, TorchCall
from autoshard.runtime.global_tensors.placed import Placed, Shape
from autoshard.torch_private import pytree, shares_memory


@dataclass(frozen=True, slots=True)
class ViewRule:
    """The rule of views.

    A dim keeps its letter if it has the same size and stride in a contiguous tensor as before. Of
    dims that `view` joins or divides, the outermost one does, where all shards are equal.

    Attributes:
        takes_sizes: True if sizes are among the arguments, so that a shard needs others.
        position: of the argument with a dim that must be whole; 0 if there is none.
        default: that dim if it is not given.
    """

    takes_sizes: bool = False
    position: int = 0
    default: int = 0

    def __call__(self, call: TorchCall) -> ShardedCall | None:
        """Find the dims of a call."""
        source = call.argument(0, "input", "self")
        changes_type = any(isinstance(x, torch.dtype) for x in (*call.args, *call.kwargs.values()))
        if not isinstance(source, Placed) or changes_type:
            return None
        whole = self._whole(call, len(source.shape))
        found = _on_meta(call)
        if found is None or whole is None:
            return None
        origins = [[_origin(dim, x, source) for dim in range(x.ndim)] for x in found]
        if not self.takes_sizes:
            origins = [
                [d if d is not None and x.shape[n] == source.shape[d] else None for n, d in o]
                for x, o in zip(found, map(enumerate, origins), strict=True)
            ]
        kept = set(range(len(source.shape))) - set(whole)
        kept = kept.intersection(*({d for d in one if d is not None} for one in origins))
        letters = tuple(str(d) if d in kept else None for d in range(len(source.shape)))
        results: list[Letters] = [
            tuple(str(d) if d in kept else None for d in one) for one in origins
        ]
        shapes = [tuple(one.shape) for one in found]
        given = [letters if x is source else (None,) * len(x.shape) for x in call.tensors]

        def compute(locals_: Sequence[torch.Tensor]) -> Any:
            if not self.takes_sizes:
                return call.compute(locals_)
            local = locals_[next(n for n, x in enumerate(call.tensors) if x is source)]
            return _resized(local, source.shape, shapes[0], origins[0], kept)

        return ShardedCall(call.tensors, given, compute, lambda n, _: results[n], shapes)

    def _whole(self, call: TorchCall, num_dims: int) -> tuple[int, ...] | None:
        """The dims that must be whole; None if the argument has none of the tensor's dims."""
        if not self.position:
            return ()
        return dims_of(call.argument(self.position, "dim", default=self.default), num_dims)


def _on_meta(call: TorchCall) -> list[torch.Tensor] | None:
    """The results on contiguous tensors without contents; None if one is no view of the first."""
    args, kwargs = pytree.tree_map_only(
        Placed,
        lambda x: torch.empty(x.shape, dtype=x.local.dtype, device="meta"),
        (tuple(call.args), dict(call.kwargs)),
    )
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    results = pytree.tree_leaves(call.function(*args, **kwargs))
    if not first.numel() or not all(_shares(one, first) for one in results):
        return None
    return results


def _shares(one: object, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and shares_memory(one, other)


def _origin(dim: int, result: torch.Tensor, source: Placed) -> int | None:
    """The dim of the source that a dim of a view is, or whose shards it divides alike."""
    size, stride = result.shape[dim], result.stride(dim)
    if size == 1:
        return None
    inner = 1
    for index in reversed(range(len(source.shape))):
        length = source.shape[index]
        if length > 1 and (size, stride) == (length, inner):
            return index
        if length > 1 and size * stride == length * inner:
            # The outermost of joined dims, or the outer part of a divided one.
            parts = source.layout.num_parts(index, tuple(source.mesh.shape))
            divides = length % parts == 0 and size % parts == 0
            return index if divides and not source.layout.sub_shards(index) else None
        inner *= length
    return None


def _resized(
    local: torch.Tensor,
    shape: Shape,
    wanted: Shape,
    origins: Sequence[int | None],
    kept: set[int],
) -> torch.Tensor:
    """A shard with the sizes that a view of the whole tensor would have."""
    sizes = [
        size
        if origin is None or origin not in kept
        else size * local.shape[origin] // shape[origin]
        for size, origin in zip(wanted, origins, strict=True)
    ]
    expands = torch.Size(sizes).numel() > local.numel()
    return local.expand(sizes) if expands else local.reshape(sizes)


def index(call: TorchCall) -> ShardedCall | None:
    """The rule of `x[...]`: numbers, slices, and one tensor or list of indices."""
    source, given = call.args
    entries = given if isinstance(given, tuple) else (given,)
    if all(_is_basic(entry) for entry in entries):
        return ViewRule()(call)
    advanced = [entry for entry in entries if isinstance(entry, Placed | list)]
    simple = all(entry in (slice(None), ...) for entry in entries if entry is not advanced[0])
    if not isinstance(source, Placed) or len(advanced) != 1 or not simple:
        return None
    chosen = advanced[0]
    if isinstance(chosen, Placed):
        if chosen.local.dtype in (torch.bool, torch.uint8):
            return None
        num_new = len(chosen.shape)
    elif all(type(number) is int for number in chosen):
        num_new = 1
    else:
        return None
    num_dims, place = len(source.shape), next(n for n, x in enumerate(entries) if x is chosen)
    if any(entry is ... for entry in entries[:place]):
        place = num_dims - (len(entries) - place)
    letters = numbered(num_dims, [place])
    result = (*letters[:place], *(None,) * num_new, *letters[place + 1 :])
    found = [letters if x is source else (None,) * len(x.shape) for x in call.tensors]
    return ShardedCall(call.tensors, found, call.compute, lambda *_: result)


def _is_basic(entry: object) -> bool:
    """True for entries of an index that select a view."""
    if isinstance(entry, slice):
        return all(x is None or type(x) is int for x in (entry.start, entry.stop, entry.step))
    return entry is None or entry is ... or type(entry) is int


def index_select(call: TorchCall) -> ShardedCall | None:
    """The rule of `index_select`: the dim of the indices is whole."""
    source, indices = call.argument(0, "input"), call.argument(2, "index")
    if not isinstance(source, Placed):
        return None
    dims = dims_of(call.argument(1, "dim"), len(source.shape))
    if dims is None:
        return None
    letters = numbered(len(source.shape), dims)
    found = call.letters((source, letters), (indices, (None,)))
    if found is None:
        return None
    return ShardedCall(call.tensors, found, call.compute, lambda *_: letters)


def cat(call: TorchCall) -> ShardedCall | None:
    """The rule of `cat`: the dim along which tensors are joined is whole."""
    tensors, num_dims = call.tensors, len(call.tensors[0].shape)
    dims = dims_of(call.argument(1, "dim", "axis", default=0), num_dims)
    if dims is None or any(len(tensor.shape) != num_dims for tensor in tensors):
        return None
    letters = numbered(num_dims, dims)
    return ShardedCall(tensors, [letters] * len(tensors), call.compute, lambda *_: letters)


def stack(call: TorchCall) -> ShardedCall | None:
    """The rule of `stack`: the new dim is whole."""
    tensors, num_dims = call.tensors, len(call.tensors[0].shape)
    dims = dims_of(call.argument(1, "dim", default=0), num_dims + 1)
    if dims is None or any(tensor.shape != tensors[0].shape for tensor in tensors):
        return None
    letters = numbered(num_dims)
    result = (*letters[: dims[0]], None, *letters[dims[0] :])
    return ShardedCall(tensors, [letters] * len(tensors), call.compute, lambda *_: result)


VIEWS: Mapping[str, Rule] = {
    **dict.fromkeys(
        ["T", "mT", "movedim", "moveaxis", "permute", "swapaxes", "swapdims", "t", "transpose"],
        ViewRule(),
    ),
    **dict.fromkeys(["slice", "unsqueeze"], ViewRule()),
    **dict.fromkeys(
        ["_unsafe_view", "broadcast_to", "expand", "expand_as", "flatten", "ravel", "reshape"],
        ViewRule(takes_sizes=True),
    ),
    **dict.fromkeys(
        ["reshape_as", "squeeze", "unflatten", "view", "view_as"], ViewRule(takes_sizes=True)
    ),
    **dict.fromkeys(["narrow", "select", "unbind"], ViewRule(position=1)),
    **dict.fromkeys(["chunk", "split", "split_with_sizes", "tensor_split"], ViewRule(position=2)),
    "__getitem__": index,
    "index_select": index_select,
    **dict.fromkeys(["cat", "concat", "concatenate"], cat),
    "stack": stack,
}
"""Rules by name of function or attribute."""
