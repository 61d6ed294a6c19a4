"""Functions that compute along dims: these are whole, or summed over ranks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.runtime.global_tensors.letters import broadcast, dims_of, numbered
from autoshard.runtime.global_tensors.on_shards import Letters, Rule, ShardedCall, TorchCall

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AlongDims:
    """The rule of functions that compute along some dims of their first tensor.

    Attributes:
        position: of the argument with the dims.
        default: the dims if it is not given; None for all dims.
    """

    position: int = 1
    default: int | None = None

    def __call__(self, call: TorchCall) -> ShardedCall | None:
        """Find the dims of a call: results lack the dims, or have them unsharded."""
        tensors = call.tensors
        dims = call.argument(self.position, "dim", "dims", "axis", default=self.default)
        found = broadcast(tensors)
        if found is None or dims is None:
            return None
        shape = found[0]
        along = dims_of(dims, len(shape))
        if along is None or any(tensor.shape != shape for tensor in tensors):
            return None
        letters = numbered(len(shape), along)
        dropped = tuple(letter for dim, letter in enumerate(letters) if dim not in along)

        def of_result(_number: int, result: torch.Tensor) -> Letters:
            return letters if result.ndim == len(letters) else dropped

        return ShardedCall(tensors, [letters] * len(tensors), call.compute, of_result)


@dataclass(frozen=True, slots=True)
class LastDims:
    """The rule of functions that normalise the last dims, with optional weights of their shape."""

    def __call__(self, call: TorchCall) -> ShardedCall | None:
        """Find the dims of a call: all but those of `normalized_shape`."""
        first, *weights = call.tensors
        normalized = call.argument(1, "normalized_shape")
        if normalized is None or isinstance(normalized, int):
            return None
        num_dims = len(first.shape)
        letters = numbered(num_dims, range(num_dims - len(normalized), num_dims))
        whole: list[Letters] = [(None,) * len(weight.shape) for weight in weights]
        return ShardedCall(call.tensors, [letters, *whole], call.compute, lambda *_: letters)


def pairwise(call: TorchCall) -> ShardedCall | None:
    """The rule of `cosine_similarity`: tensors broadcast, and a dim of the result is reduced."""
    found = broadcast(call.tensors)
    if found is None:
        return None
    shape, _ = found
    dims = dims_of(call.argument(2, "dim", default=1), len(shape))
    if dims is None:
        return None
    shape, letters = broadcast(call.tensors, dims) or found
    result = tuple(x for dim, x in enumerate(numbered(len(shape))) if dim not in dims)
    return ShardedCall(call.tensors, letters, call.compute, lambda *_: result)


@dataclass(frozen=True, slots=True)
class ReductionRule:
    """The rule of reductions that can reduce what ranks have reduced of their shards.

    Attributes:
        position: of the argument with the dims, which `keepdim` follows.
        combine: reduces along the first dim; takes the call too.
        splits_ties: True if the gradient of equal elements would depend on how ranks share them,
            so that it needs the full tensor.
    """

    combine: Callable[[TorchCall, torch.Tensor], torch.Tensor]
    position: int = 1
    splits_ties: bool = False

    def __call__(self, call: TorchCall) -> ShardedCall | None:
        """Find the dims of a call."""
        (tensor, *others), num_dims = call.tensors, len(call.tensors[0].shape)
        given = call.argument(self.position, "dim", "axis")
        keeps = bool(call.argument(self.position + 1, "keepdim", "keepdims", default=False))
        along = tuple(range(num_dims)) if given in (None, (), []) else dims_of(given, num_dims)
        if others or along is None:
            return None
        if self.splits_ties and tensor.local.requires_grad and torch.is_grad_enabled():
            return AlongDims(self.position)(call)
        result = _reduced_letters(num_dims, along, keeps=keeps)
        return ShardedCall(
            [tensor],
            [numbered(num_dims)],
            call.compute,
            lambda *_: result,
            combine=lambda parts: self.combine(call, parts),
        )


def _reduced_letters(num_dims: int, along: Collection[int], *, keeps: bool) -> Letters:
    """The letters of a result without some dims, or with these of size 1."""
    letters = numbered(num_dims, along)
    return letters if keeps else tuple(x for dim, x in enumerate(letters) if dim not in along)


def norm(call: TorchCall) -> ShardedCall | None:
    """The rule of norms of vectors: the norm of the norms of shards."""
    order = call.argument(1, "p", "ord", default=2)
    is_general = "linalg_norm" in call.function.__name__  # of matrices, if it is given an order
    if (is_general and order is not None) or (isinstance(order, str) and order != "fro"):
        return None
    exponent = 2 if order is None or isinstance(order, str) else order
    if exponent == 0:  # a count without a gradient
        return AlongDims(2)(call)

    def combine(_: TorchCall, parts: torch.Tensor) -> torch.Tensor:
        combined: torch.Tensor = torch.linalg.vector_norm(parts, exponent, dim=0)
        return combined

    return ReductionRule(combine, position=2)(call)


def flip(call: TorchCall) -> ShardedCall | None:
    """The rule of `flip`, whose dims may also be arguments of their own."""
    dims = call.argument(1, "dims")
    dims = call.args[1:] if isinstance(dims, int) else dims
    return AlongDims()(TorchCall(call.function, call.args[:1], {"dims": dims}))


@dataclass(frozen=True, slots=True)
class Truth:
    """The rule of `all` and `any`: along a dim, or of all elements, which ranks count.

    Attributes:
        is_all: True for `all`, which counts the elements that are false.
    """

    is_all: bool

    def __call__(self, call: TorchCall) -> ShardedCall | None:
        """Find the dims of a call."""
        if call.argument(1, "dim", "axis") is not None:
            return AlongDims()(call)
        if call.tensors[0].local.dtype is torch.uint8:  # their result is uint8 as well
            return None
        if self.is_all:
            return Sum(of=torch.logical_not, then=lambda num: num == 0)(call)
        return Sum(of=lambda values: values != 0, then=lambda num: num > 0)(call)


def extremum(call: TorchCall) -> ShardedCall | None:
    """The rule of `max` and `min`: of elements of two tensors, or along a dim."""
    tensors = call.tensors
    if len(tensors) > 1:
        found = broadcast(tensors)
        return found and ShardedCall(
            tensors, found[1], call.compute, lambda *_: numbered(len(found[0]))
        )
    if call.argument(1, "dim") is not None:
        return AlongDims()(call)
    reduce = torch.amax if call.function.__name__.startswith("max") else torch.amin
    return ReductionRule(lambda _, parts: reduce(parts, 0), splits_ties=True)(call)


@dataclass(frozen=True, slots=True)
class Sum:
    """The rule of sums over dims, and of what follows from sums.

    Attributes:
        is_mean: True if the sum is divided by the number of its elements.
        of: computes what is summed, from a shard; None for the elements themselves.
        then: applied to the full sum.
    """

    is_mean: bool = False
    of: Callable[[torch.Tensor], torch.Tensor] | None = None
    then: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, call: TorchCall) -> ShardedCall | None:
        """Find the dims of a call; the ranks that shard a summed dim add their sums."""
        (tensor, *others), num_dims = call.tensors, len(call.tensors[0].shape)
        given = call.argument(1, "dim", "axis")
        keeps = bool(call.argument(2, "keepdim", "keepdims", default=False))
        dtype = call.argument(3, "dtype")
        along = tuple(range(num_dims)) if given in (None, (), []) else dims_of(given, num_dims)
        if others or along is None or set(call.kwargs) - _KNOWN or isinstance(given, torch.dtype):
            return None
        result = _reduced_letters(num_dims, along, keeps=keeps)
        if self.is_mean and not (dtype or tensor.local.dtype).is_floating_point:
            return None
        count = 1
        for dim in along:
            count *= tensor.shape[dim]
        wanted = dtype or tensor.local.dtype
        narrow = wanted in _HALF

        def compute(locals_: Any) -> torch.Tensor:
            values = locals_[0] if self.of is None else self.of(locals_[0])
            # Sums in 16 bits would overflow, or lose digits, before ranks add them.
            summed = torch.float32 if narrow else dtype
            return torch.sum(values, dim=along, keepdim=keeps, dtype=summed)

        def finish(total: torch.Tensor) -> torch.Tensor:
            total = total / count if self.is_mean else total
            total = total.to(wanted) if narrow else total
            return total if self.then is None else self.then(total)

        return ShardedCall(
            [tensor],
            [numbered(num_dims)],
            compute,
            lambda *_: result,
            sums=True,
            finish=finish,
        )


_KNOWN = {"dim", "axis", "keepdim", "keepdims", "dtype", "input"}

ALONG: Mapping[str, Rule] = {
    **dict.fromkeys(
        [
            *("argmax", "argmin", "count_nonzero", "nanmean", "nansum", "std", "var"),
            *("log_softmax", "softmax", "_log_softmax", "_softmax"),
            *("softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "nanmedian"),
            *("median", "gather", "take_along_dim", "scatter", "scatter_add", "std_mean"),
            *("var_mean",),
        ],
        AlongDims(),
    ),
    **dict.fromkeys(["sort", "argsort", "mode", "glu"], AlongDims(default=-1)),
    **dict.fromkeys(["topk", "kthvalue"], AlongDims(position=2, default=-1)),
    "roll": AlongDims(position=2),
    **dict.fromkeys(["norm", "vector_norm", "linalg_norm", "linalg_vector_norm"], norm),
    "amax": ReductionRule(lambda _, parts: parts.amax(0), splits_ties=True),
    "amin": ReductionRule(lambda _, parts: parts.amin(0), splits_ties=True),
    "logsumexp": ReductionRule(lambda _, parts: parts.logsumexp(0)),
    "prod": ReductionRule(lambda _, parts: parts.prod(0)),
    "normalize": AlongDims(position=2, default=1),
    "cosine_similarity": pairwise,
    **dict.fromkeys(["layer_norm", "rms_norm"], LastDims()),
    **dict.fromkeys(["max", "min"], extremum),
    "all": Truth(is_all=True),
    "any": Truth(is_all=False),
    "flip": flip,
}
"""Rules by name of function."""

SUMS: Mapping[str, Rule] = {"sum": Sum(), "mean": Sum(is_mean=True)}
"""Rules of sums over any dims by name of function."""
