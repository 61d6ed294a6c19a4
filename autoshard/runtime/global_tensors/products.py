"""Products and lookups: a dim that one tensor has alone may be sharded."""

from collections.abc import Mapping
from string import ascii_letters

from torch.nn import functional

from autoshard.runtime.global_tensors.letters import broadcast, numbered
from autoshard.runtime.global_tensors.on_shards import Letters, Rule, ShardedCall, TorchCall
from autoshard.runtime.global_tensors.placed import Placed


def matmul(call: TorchCall) -> ShardedCall | None:
    """The rule of matrix products; ranks that shard the contracted dim add their products."""
    left, right = call.argument(0, "input"), call.argument(1, "other", "mat2", "vec", "tensor")
    if not isinstance(left, Placed) or not isinstance(right, Placed):
        return None
    if min(len(left.shape), len(right.shape)) < 1:
        return None
    rows = ["i"] if len(left.shape) > 1 else []
    columns = ["j"] if len(right.shape) > 1 else []
    outer = [
        Placed(x.local, x.layout, x.shape[: max(len(x.shape) - 2, 0)], x.mesh)
        for x in (left, right)
    ]
    found = broadcast(outer)
    if found is None:
        return None
    shape, (outer_left, outer_right) = found
    letters = call.letters(
        (left, (*outer_left, *rows, "k")), (right, (*outer_right, "k", *columns))
    )
    result = (*numbered(len(shape)), *rows, *columns)
    if letters is None:
        return None
    return ShardedCall(call.tensors, letters, call.compute, lambda *_: result, sums=True)


def linear(call: TorchCall) -> ShardedCall | None:
    """The rule of `linear`; a bias would be added once per rank, so the inner dim is whole."""
    first, weight = call.argument(0, "input"), call.argument(1, "weight")
    bias = call.argument(2, "bias")
    if not (isinstance(first, Placed) and isinstance(weight, Placed) and len(weight.shape) > 1):
        return None
    outer = numbered(len(first.shape) - 1)
    inner = "k" if bias is None else None
    letters = call.letters((first, (*outer, inner)), (weight, ("j", inner)), (bias, ("j",)))
    if letters is None:
        return None
    return ShardedCall(
        call.tensors, letters, call.compute, lambda *_: (*outer, "j"), sums=bias is None
    )


def einsum(call: TorchCall) -> ShardedCall | None:
    """The rule of `einsum`, of an equation whose letters stand once in each operand."""
    equation = call.argument(0, "equation")
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    operands = inputs.split(",")
    texts = [*operands, result]
    if any(len(set(text)) < len(text) or set(text) - set(ascii_letters) for text in texts):
        return None
    tensors = call.tensors
    if [len(text) for text in operands] != [len(tensor.shape) for tensor in tensors]:
        return None
    # A dim of size 1 is broadcast to that of the other operand.
    sizes: dict[str, set[int]] = {}
    for text, tensor in zip(operands, tensors, strict=True):
        for letter, size in zip(text, tensor.shape, strict=True):
            sizes.setdefault(letter, set()).add(size)
    if any(len(found) > 1 for found in sizes.values()):
        return None
    letters: list[Letters] = [tuple(text) for text in operands]
    return ShardedCall(tensors, letters, call.compute, lambda *_: tuple(result), sums=True)


def embedding(call: TorchCall) -> ShardedCall | None:
    """The rule of `embedding`: indices may be sharded, and the columns of the table."""
    if call.function is functional.embedding:
        indices, table = call.argument(0, "input"), call.argument(1, "weight")
        if call.argument(3, "max_norm") is not None:
            return None  # it would renormalise rows of the table
    else:  # `torch.embedding` and the operator
        table, indices = call.argument(0, "weight"), call.argument(1, "indices")
    if not isinstance(indices, Placed):
        return None
    outer = numbered(len(indices.shape))
    letters = call.letters((indices, outer), (table, (None, "j")))
    if letters is None:
        return None
    return ShardedCall(call.tensors, letters, call.compute, lambda *_: (*outer, "j"))


def one_hot(call: TorchCall) -> ShardedCall | None:
    """The rule of `one_hot` with a number of classes that is given."""
    num_classes = call.argument(1, "num_classes", default=-1)
    if type(num_classes) is not int or num_classes < 0:
        return None
    outer = numbered(len(call.tensors[0].shape))
    return ShardedCall(call.tensors, [outer], call.compute, lambda *_: (*outer, None))


PRODUCTS: Mapping[str, Rule] = {
    **dict.fromkeys(["matmul", "__matmul__", "mm", "bmm", "mv", "dot"], matmul),
    "linear": linear,
    "einsum": einsum,
    "embedding": embedding,
    "one_hot": one_hot,
}
"""Rules by name of function."""
