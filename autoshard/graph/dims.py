"""Dims among the arguments of ATen operators, and the tensors whose dims they count.

Most operators count the dims of their first tensor. Some count those of their result, or of their
tensors after broadcasting, and weight norms mean all dims by -1. An operator that is not listed
here keeps its dims as they are written, and PyTorch counts them when it runs.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto
from functools import lru_cache
from types import MappingProxyType

from autoshard.errors import SchemaError
from autoshard.graph.ir import Argument, Node, Tensor


class Counted(Enum):
    """The tensor whose dims an argument counts."""

    FIRST = auto()
    SECOND = auto()
    RESULT = auto()
    BROADCAST = auto()
    """The tensors after broadcasting."""
    JOINED = auto()
    """The tensors of a concatenation, of which those of shape (0,) do not count."""
    FIRST_OR_ALL = auto()
    """The first tensor, and -1 means all of its dims."""


_COUNT_THE_FIRST = frozenset(
    """
    _log_softmax _logcumsumexp _masked_softmax _safe_softmax _softmax all amax amin aminmax any
    argmax argmin argsort chunk count_nonzero cross cummax cummin cumprod cumsum
    cumulative_trapezoid diagonal diagonal_copy diagonal_scatter diff fft_fft fft_fft2 fft_fftn
    fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
    fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn flatten flip
    frobenius_norm gather glu gradient index_add index_copy index_fill index_reduce index_select
    kthvalue linalg_cross linalg_diagonal linalg_matrix_norm linalg_norm linalg_tensorsolve
    linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min mode moveaxis movedim
    nanmean nanmedian nanquantile nansum narrow narrow_copy norm nuclear_norm permute permute_copy
    prod quantile renorm repeat_interleave roll rot90 scatter scatter_add scatter_reduce select
    select_copy select_scatter slice slice_copy slice_scatter softmax sort special_log_softmax
    special_logsumexp special_softmax split split_copy split_with_sizes split_with_sizes_copy
    squeeze squeeze_copy std std_mean sum swapaxes swapdims take_along_dim tensor_split topk
    transpose transpose_copy trapezoid trapz unbind unbind_copy unflatten unfold unfold_copy
    unique_consecutive unique_dim unique_dim_consecutive unsafe_chunk unsafe_split
    unsafe_split_with_sizes var var_mean
    """.split()  # noqa: SIM905  a table of words
)
_NAMES = (
    *("axis0", "axis1", "destination", "dim", "dim0", "dim1", "dim2", "dimension", "dims"),
    *("end_dim", "source", "start_dim"),
)
"""Names of arguments that are dims; a `source` may be a tensor too."""

_OTHERS: Mapping[str, Mapping[str, Counted]] = {
    "_weight_norm": {"dim": Counted.FIRST_OR_ALL},
    "cat": {"dim": Counted.JOINED},
    "concat": {"dim": Counted.JOINED},
    "concatenate": {"dim": Counted.JOINED},
    "cosine_similarity": {"dim": Counted.BROADCAST},
    "diag_embed": {"dim1": Counted.RESULT, "dim2": Counted.RESULT},
    "linalg_vecdot": {"dim": Counted.BROADCAST},
    "norm_except_dim": {"dim": Counted.FIRST_OR_ALL},
    "stack": {"dim": Counted.RESULT},
    "tensordot": {"dims_self": Counted.FIRST, "dims_other": Counted.SECOND},
    "unsqueeze": {"dim": Counted.RESULT},
    "unsqueeze_copy": {"dim": Counted.RESULT},
}
_FIRST: Mapping[str, Counted] = MappingProxyType(dict.fromkeys(_NAMES, Counted.FIRST))
_NONE: Mapping[str, Counted] = MappingProxyType({})


@lru_cache(maxsize=1 << 12)
def dim_arguments(operator: str) -> Mapping[str, Counted]:
    """The arguments of an operator that are dims, and what they count; empty if not known."""
    namespace, _, rest = operator.partition(".")
    packet = rest.partition(".")[0]
    if packet.endswith("_") and not packet.endswith("__"):
        packet = packet[:-1]  # an in-place operator counts as the other
    if namespace != "aten":
        return _NONE
    return _FIRST if packet in _COUNT_THE_FIRST else _OTHERS.get(packet, _NONE)


def with_explicit_dims(node: Node, values: Mapping[str, Tensor]) -> Node:
    """The node with non-negative dims; -1 stays where it means all dims.

    Raises:
        SchemaError: a dim is out of range.
    """
    counted = dim_arguments(node.operator)
    if not counted or not node.inputs:
        return node
    arguments = tuple(
        (name, _from_front(value, counted[name], node, values) if name in counted else value)
        for name, value in node.arguments
    )
    return node if arguments == node.arguments else replace(node, arguments=arguments)


def check_dims(node: Node, values: Mapping[str, Tensor]) -> None:
    """Check the dims among the arguments of a call.

    Raises:
        SchemaError: a dim is out of range; or a weight norm has magnitudes of another shape than
            its norms, which PyTorch does not check, but reads and writes beyond their memory.
    """
    with_explicit_dims(node, values)
    if node.operator == "aten._weight_norm.default":
        _check_magnitudes(node, values)


def _from_front(
    dim: Argument, counted: Counted, node: Node, values: Mapping[str, Tensor]
) -> Argument:
    if isinstance(dim, tuple):
        return tuple(_from_front(d, counted, node, values) for d in dim)
    if isinstance(dim, bool) or not isinstance(dim, int):
        return dim
    if dim == -1 and counted is Counted.FIRST_OR_ALL:
        return dim
    rank = max(_rank(counted, node, values), 1)
    if counted is Counted.BROADCAST and rank == 1 and dim not in (-1, 0):
        return dim  # linalg.vecdot does not look at the dim of vectors
    return within(dim, rank, f"node {node.name!r} ({node.operator}): dim")


def _rank(counted: Counted, node: Node, values: Mapping[str, Tensor]) -> int:
    ranks = [len(values[name].shape) for name in node.inputs]
    match counted:
        case Counted.FIRST | Counted.FIRST_OR_ALL:
            return ranks[0]
        case Counted.SECOND:
            return ranks[1] if len(ranks) > 1 else 0
        case Counted.RESULT:
            return len(values[node.outputs[0]].shape) if node.outputs else 0
        case Counted.BROADCAST:
            return max(ranks)
        case Counted.JOINED:
            shapes = (values[name].shape for name in node.inputs)
            return next((len(shape) for shape in shapes if shape != (0,)), 1)


def within(index: int, size: int, what: str) -> int:
    """A non-negative index into something of a given size.

    Raises:
        SchemaError: it is out of range.
    """
    if not -size <= index < size:
        raise SchemaError(f"{what} {index} is out of range for size {size}")
    return index % size


def _check_magnitudes(node: Node, values: Mapping[str, Tensor]) -> None:
    shapes = [values[name].shape for name in node.inputs]
    dim = with_explicit_dims(node, values).argument("dim", 0)
    norms = () if dim == -1 else tuple(n if d == dim else 1 for d, n in enumerate(shapes[0]))
    if shapes[1:] != [norms]:
        raise SchemaError(
            f"node {node.name!r} ({node.operator}): the norms of a weight of shape {shapes[0]} "
            f"along dim {dim} have shape {norms}, not {shapes[1:]}"
        )
