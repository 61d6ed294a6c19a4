"""The element type that PyTorch computes in when an operator's inputs differ.

Source: `torch.result_type`: the highest category among dimmed tensors, else among scalars.
"""

from autoshard.graph.ir import DType, Tensor

_CATEGORIES = (
    frozenset({DType.BOOL}),
    frozenset(d for d in DType if d.value.startswith(("int", "uint"))),
    frozenset(d for d in DType if d.value.startswith(("float", "bfloat"))),
    frozenset(d for d in DType if d.value.startswith("complex")),
)


def category(dtype: DType) -> int:
    """0 for truth values, 1 for integers, 2 for reals, 3 for complex numbers."""
    return next(i for i, dtypes in enumerate(_CATEGORIES) if dtype in dtypes)


def keeps_dtype(own: Tensor, other: Tensor) -> bool:
    """Whether combining a tensor with another one gives the element type of the first."""
    rank, other_rank = category(own.dtype), category(other.dtype)
    if own.dtype is other.dtype or rank != other_rank:
        return rank >= other_rank
    if not other.shape and own.shape:
        return True
    signed = own.dtype.value.startswith("int") and other.dtype is DType.UINT8
    return own.dtype.itemsize > other.dtype.itemsize and (
        signed or own.dtype.value.startswith("u") == other.dtype.value.startswith("u")
    )
