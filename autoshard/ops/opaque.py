"""Modules that are kept whole (`autoshard.graph.opaque_call`): replicated, or along the batch."""

from math import inf

from autoshard.errors import SchemaError
from autoshard.graph.opaque_call import OPAQUE_MODULE
from autoshard.ops.rules.index_space import IndexSpace
from autoshard.ops.rules.rule import Dims, OperatorRule
from autoshard.ops.rules.spec import (
    Call,
    ExtraTensor,
    Gradients,
    Kernel,
    OperatorSpec,
    SavedByAutograd,
    saved_by_name,
)
from autoshard.ops.rules.strides import Shape


def _opaque(call: Call) -> OperatorRule:
    """Dim 0 of tensors of the batch size shares a letter if the module is called along it."""
    space = IndexSpace(call)
    tensors = call.positions("tensors")
    size = call.inputs[tensors[0]].shape[:1] if tensors else ()
    batch = space.free(size[0]) if size and call.flag("along_batch") else ()

    def dims(shape: Shape) -> Dims:
        if batch and shape[:1] == size:
            return (batch, *space.fixed_dims(shape[1:]))
        return space.fixed_dims(shape)

    inputs = [
        dims(tensor.shape) if i in tensors else space.fixed_dims(tensor.shape)
        for i, tensor in enumerate(call.inputs)
    ]
    outputs = [dims(tensor.shape) for tensor in call.outputs]
    flops = call.number("flops", 0.0)
    if not 0.0 <= flops < inf:
        raise SchemaError(f"{call.operator}: flops is {flops}, not a number of operations")
    return space.rule(inputs, outputs, flops=flops)


def _saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """The inputs, and the bytes that were measured, of which a rank has the share of its rows."""
    nbytes, tensors = max(call.integer("saved_bytes", 0), 0), call.positions("tensors")
    rows = call.inputs[tensors[0]].shape[:1] if tensors and call.flag("along_batch") else ()
    if not any(rows):
        return saved_by_name("tensors state", call, gradients, ExtraTensor((), nbytes))
    per_row = ExtraTensor(((tensors[0], 0),), -(-nbytes // rows[0]))
    return saved_by_name("tensors state", call, gradients, per_row)


SPEC = OperatorSpec(
    OPAQUE_MODULE,
    _opaque,
    saves=_saves,
    kernel=Kernel.MODULE,
    draws="random",
    unsharded="The module is kept whole; OpaqueModule(..., along_batch=True) shards its batch.",
)
"""Not among the families of operators, whose examples run without a model."""
