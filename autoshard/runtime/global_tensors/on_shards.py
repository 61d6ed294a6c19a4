"""Functions of torch that each rank runs on its shards alone.

A rule states which dims of the tensors of a call belong together, by letters: a product of
`[b, i, k]` and `[k, j]` has `b`, `i` and `j` in its result, so any of them may be sharded. What is
sharded along a dim without a letter is gathered first; tensors that lack a letter are whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from autoshard.layouts import AxisType, I, Layout, P, R, S
from autoshard.runtime.global_tensors.placed import Placed, Shape
from autoshard.torch_private import pytree

Letters = tuple[str | None, ...]
"""A letter for each dim of a tensor; None for a dim that must be whole."""


@dataclass(frozen=True, slots=True)
class ShardedCall:
    """A call of a function of torch, and the dims along which ranks can divide it.

    Attributes:
        tensors: the tensor arguments.
        letters: of each of them.
        compute: runs the call on a rank's parts of the tensors.
        results: gives the letters of each tensor of the result, from its number and itself.
        shapes: global shapes of the results where a lettered dim has another size than in the
            arguments, as rows that a view joins; None if all sizes are those of the arguments.
        sums: True if the result is a sum over the letters that it lacks; otherwise it lacks none.
        combine: computes a result from those of the ranks along the letters that it lacks, which
            are stacked along a new first dim.
        finish: computes the result from what ranks have summed.
        leader: index of the tensor whose layout decides; None for the one with most shards.
    """

    tensors: Sequence[Placed]
    letters: Sequence[Letters]
    compute: Callable[[Sequence[torch.Tensor]], Any]
    results: Callable[[int, torch.Tensor], Letters]
    shapes: Sequence[Shape] | None = None
    sums: bool = False
    combine: Callable[[torch.Tensor], torch.Tensor] | None = None
    finish: Callable[..., torch.Tensor] | None = None
    leader: int | None = None


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of a function of torch with tensors that are sharded.

    Attributes:
        function: the function.
        args: positional arguments; tensors are `Placed`, also within lists.
        kwargs: keyword arguments, likewise.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[Placed]:
        """All tensors, in the order of the arguments."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Placed)]

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by its position or one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def letters(self, *known: tuple[Placed | None, Letters]) -> list[Letters] | None:
        """Letters of all tensors from those of arguments; None if there are further tensors."""
        by_identity = {id(tensor): letters for tensor, letters in known}
        tensors = self.tensors
        if not all(id(tensor) in by_identity for tensor in tensors):
            return None
        return [by_identity[id(tensor)] for tensor in tensors]

    def compute(self, locals_: Sequence[torch.Tensor], **changed: Any) -> Any:
        """Run the function with a rank's parts in place of the tensors, in their order."""
        parts = iter(locals_)
        args, kwargs = pytree.tree_map_only(
            Placed, lambda _: next(parts), (tuple(self.args), dict(self.kwargs))
        )
        return self.function(*args, **{**kwargs, **changed})


Rule = Callable[[TorchCall], ShardedCall | None]
"""Finds the dims along which a call can be divided; None if its tensors must be gathered."""


def sharded_letters(call: ShardedCall) -> dict[int, tuple[str, AxisType]]:
    """The letter that each mesh axis shards, with the type; outermost axes first.

    They are those of the tensor that is sharded along most axes; of several, the largest.
    """
    candidates = [_kept(t, letters) for t, letters in zip(call.tensors, call.letters, strict=True)]
    if call.leader is not None:
        return candidates[call.leader]
    # Global sizes: those of shards may differ between ranks, which must all choose alike.
    sizes = [prod(t.shape) for t in call.tensors]
    best = max(range(len(candidates)), key=lambda n: (len(candidates[n]), sizes[n]), default=None)
    return {} if best is None else candidates[best]


def _kept(tensor: Placed, letters: Letters) -> dict[int, tuple[str, AxisType]]:
    """The axes that shard dims with a letter, in the order of nesting."""
    kept = {}
    for dim, letter in enumerate(letters):
        if letter is not None:
            for axis in tensor.layout.sharding_axes(dim):
                kept[axis] = (letter, tensor.layout.types[axis])
    return kept


def layout_of(
    letters: Letters, sharded: dict[int, tuple[str, AxisType]], num_axes: int, *, lacking: AxisType
) -> Layout:
    """The layout of a tensor in which axes shard its letters.

    Args:
        letters: of the tensor.
        sharded: from `sharded_letters`.
        num_axes: of the mesh.
        lacking: type of an axis whose letter the tensor lacks.
    """
    types = [I] * num_axes
    for axis, (letter, shard) in sharded.items():
        if letter in letters:
            types[axis] = S(letters.index(letter), shard.sub_shards)
        else:
            types[axis] = lacking
    return Layout.nested(types, [*sharded, *(a for a in range(num_axes) if a not in sharded)])


def run_on_shards(call: ShardedCall) -> tuple[Any, list[Placed]] | None:
    """Run a call on this rank's shards.

    Returns:
        The result, with a `Placed` for each tensor of it, and the tensors as they were computed
        with; None if nothing would be sharded.
    """
    sharded = sharded_letters(call)
    if not sharded:
        return None
    mesh = call.tensors[0].mesh
    parts = [
        tensor.resharded(layout_of(letters, sharded, mesh.ndim, lacking=R))
        for tensor, letters in zip(call.tensors, call.letters, strict=True)
    ]
    leaves, spec = pytree.tree_flatten(call.compute([part.local for part in parts]))
    # A dim that carries a letter has the size that the letter has in the arguments.
    sizes = {
        letter: size
        for tensor, letters in zip(call.tensors, call.letters, strict=True)
        for letter, size in zip(letters, tensor.shape, strict=True)
    }

    def place(number: int, local: Any) -> Any:
        if not isinstance(local, torch.Tensor):
            return local
        letters = call.results(number, local)
        pairs = zip(letters, local.shape, strict=True)
        shape = tuple(size if letter is None else sizes[letter] for letter, size in pairs)
        shape = shape if call.shapes is None else call.shapes[number]
        part = Placed(local, layout_of(letters, sharded, mesh.ndim, lacking=P), shape, mesh)
        if call.combine is not None and part.layout.is_partial:
            return _combined(call.combine, part)
        assert call.sums or not part.layout.is_partial, "only sums lack what is sharded"
        return part.reduced()

    placed = [place(number, leaf) for number, leaf in enumerate(leaves)]
    if call.finish is None:
        return pytree.tree_unflatten(placed, spec), parts
    finished = call.finish(*(one.local for one in placed))
    return Placed(finished, placed[0].layout, placed[0].shape, mesh), parts


def _combined(combine: Callable[[torch.Tensor], torch.Tensor], part: Placed) -> Placed:
    """Combine the results of ranks that had different shards."""
    axes = [axis for axis, t in enumerate(part.layout.types) if t == P]
    moved = [S(t.dim + 1, t.sub_shards) if t.is_shard else t for t in part.layout.types]
    nesting = part.layout.nesting
    stacked = Layout(tuple(S(0) if t == P else t for t in moved), nesting)
    whole = Layout(tuple(I if t == P else t for t in moved), nesting)
    num_parts = prod(part.mesh.size(axis) for axis in axes)
    parts = Placed(part.local.unsqueeze(0), stacked, (num_parts, *part.shape), part.mesh)
    types = tuple(I if t == P else t for t in part.layout.types)
    local = combine(parts.resharded(whole).local)
    return Placed(local, Layout(types, nesting), part.shape, part.mesh)
