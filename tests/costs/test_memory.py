from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.costs import (
    OptimizerSpec,
    ParameterBytes,
    activation_bytes,
    parameter_bytes,
    parse_bytes,
    saved_bytes,
)
from autoshard.errors import OptionError
from autoshard.graph import DType, Tensor
from autoshard.ops import ExtraTensor, OperatorRule, SavedByAutograd, strategies


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        (" 512 MiB ", 2**29),
        ("2TB", 2 * 10**12),
        ("1PiB", 2**50),
        ("3kB", 3000),
        ("3KB", 3000),
        ("1KiB", 1024),
        ("7B", 7),
        ("1024", 1024),
        ("0.0015kB", 1),
        ("123456789.123456789GB", 123456789123456789),
    ],
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "80Gb", "80 gigs", "80GBs", "1e9", "nan", "1.GB", "8 0GB", "٣GB"]
)
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not an amount of memory; write a number and one of"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.5B"])
def test_less_than_a_byte_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is less than one byte"):
        parse_bytes(text)


@given(st.integers(1, 10**17), st.sampled_from([("GB", 10**9), ("GiB", 2**30), ("", 1)]))
def test_whole_amounts_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{number}{unit[0]}") == number * unit[1]


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
