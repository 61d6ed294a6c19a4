"""Recurrent layers as one operator each."""

from collections.abc import Mapping
from math import prod

from autoshard.ops.call import Call, Rule
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Shape, Space


def _recurrent(call: Call) -> OperatorRule:
    """A recurrence over a whole sequence: samples are independent, nothing else is.

    The next step needs all of the last one's state, so time and state stay whole. The flops
    are two per sample, step and weight.
    """
    source = call.inputs[0].shape
    batched = len(source) == 3  # noqa: PLR2004  time, samples, features
    batch = 0 if call.flag("batch_first") else 1
    space = Space(call)
    samples = space.free(source[batch]) if batched else ()

    def dims(shape: Shape, at: int) -> Dims:
        return tuple(
            samples if batched and dim == at else space.fixed(size)
            for dim, size in enumerate(shape)
        )

    states = call.positions("hx")
    weights = [call.inputs[i] for i in call.positions("params")]
    inputs = [
        dims(source, batch),
        *[dims(call.inputs[i].shape, 1) for i in states],
        *[space.fixed_dims(weight.shape) for weight in weights],
    ]
    outputs = [dims(t.shape, batch if i == 0 else 1) for i, t in enumerate(call.outputs)]
    flops = 2.0 * prod(source[:-1]) * sum(weight.numel for weight in weights)
    return space.rule(inputs, outputs, flops=flops)


RULES: Mapping[str, Rule] = {
    "aten.lstm.input": _recurrent,
    "aten.gru.input": _recurrent,
}
