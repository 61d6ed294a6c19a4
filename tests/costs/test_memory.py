from math import prod

import pytest

from autoshard.costs import (
    OptimizerSpec,
    ParameterBytes,
    activation_bytes,
    parameter_bytes,
    saved_bytes,
)
from autoshard.graph import DType, Tensor
from autoshard.ops import ExtraTensor, OperatorRule, SavedByAutograd, strategies


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer"),
    [
        ("none", DType.FLOAT32, 0),
        ("sgd", DType.FLOAT32, 0),
        ("sgd-momentum", DType.FLOAT32, 4 * 600),
        ("adam", DType.FLOAT32, 8 * 600),
        ("adamw", DType.BFLOAT16, 4 * 600),
        ("adafactor", DType.FLOAT32, 4 * (20 + 30)),
    ],
)
def test_parameters_hold_value_gradient_and_state(name: str, dtype: DType, optimizer: int) -> None:
    found = parameter_bytes((20, 30), dtype, OptimizerSpec.named(name))
    nbytes = 600 * dtype.itemsize
    assert found == ParameterBytes(parameter=nbytes, gradient=nbytes, optimizer=optimizer)
    assert found.total == 2 * nbytes + optimizer


def test_what_is_not_trained_has_no_gradient_and_no_state() -> None:
    assert parameter_bytes((20, 30), DType.BFLOAT16) == ParameterBytes(1200)


def test_activations_are_the_local_outputs() -> None:
    rule = OperatorRule(
        sizes={"b": 8, "s": 16, "h": 32, "n": 64},
        inputs=((("b",), ("s",), ("h",)), (("n",), ("h",))),
        outputs=((("b", "s"), ("n",)),),
        contracted=frozenset("h"),
        flops_per_point=2.0,
    )
    outputs = [Tensor((128, 64), DType.BFLOAT16)]
    found = strategies(rule, (2, 4))
    nbytes = activation_bytes(rule, found, outputs)
    assert nbytes.tolist() == [2 * prod(s.outputs[0].local_shape((128, 64), (2, 4))) for s in found]
    assert nbytes.max() == 2 * 128 * 64
    assert not activation_bytes(rule, found, outputs, is_view=True).any()


def test_what_is_kept_follows_the_local_sizes() -> None:
    rule = OperatorRule(
        sizes={"b": 8, "s": 16, "h": 32},
        inputs=((("b",), ("s",), ("h",)), (("h",),)),
        outputs=((("b",), ("s",), ("h",)),),
    )
    tensors = [Tensor((8, 16, 32), DType.BFLOAT16), Tensor((32,), DType.BFLOAT16)]
    # a norm: its inputs, and two numbers per position
    saved = SavedByAutograd(
        frozenset({0, 1}), extras=(ExtraTensor(((0, 0), (2, 1)), itemsize=4, times=2),)
    )
    found = strategies(rule, (2, 4))
    kept = saved_bytes(rule, found, tensors, tensors[:1], saved)
    for i, strategy in enumerate(found):
        shapes = [
            layout.local_shape(tensor.shape, (2, 4))
            for layout, tensor in zip(
                (*strategy.inputs, *strategy.outputs), (*tensors, tensors[0]), strict=True
            )
        ]
        assert kept.inputs[0][i] == 2 * prod(shapes[0])
        assert kept.inputs[1][i] == 2 * prod(shapes[1])
        assert kept.extra[i] == saved.extras[0].nbytes(shapes)
    assert kept.outputs == {}
    assert kept.extra.max() == 2 * 4 * 8 * 16
