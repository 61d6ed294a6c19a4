"""Calls of operators by name, and operators that a plan may not call."""

import pytest
import torch

from autoshard.errors import PlanError
from autoshard.graph import Argument, Node, Ref, Token, TokenKind, references
from autoshard.ops.calls import resolve_operator
from autoshard.runtime.program.operators import OperatorCall

CPU = torch.device("cpu")


def call(name: str, *outputs: str, **arguments: Argument) -> OperatorCall:
    return OperatorCall(Node("node", name, tuple(arguments.items()), outputs or ("out",)), CPU)


def test_arguments_go_where_the_schema_wants_them() -> None:
    add = call("aten.add.Tensor", self=Ref("a"), other=Ref("b"), alpha=3)
    (result,) = add([torch.ones(2), torch.ones(2)])
    assert result.tolist() == [4.0, 4.0]


def test_a_gap_in_positional_arguments() -> None:
    norm = call("aten.layer_norm.default", input=Ref("x"), normalized_shape=(4,), eps=1e-3)
    x = torch.randn(2, 4)
    torch.testing.assert_close(norm([x])[0], torch.nn.functional.layer_norm(x, (4,), eps=1e-3))


def test_lists_of_tensors_with_and_without_holes() -> None:
    cat = call("aten.cat.default", tensors=(Ref("a"), Ref("b")), dim=0)
    assert cat([torch.ones(1), torch.zeros(1)])[0].tolist() == [1.0, 0.0]
    index = call("aten.index.Tensor", self=Ref("x"), indices=(None, Ref("i")))
    x = torch.arange(6).view(2, 3)
    assert index([x, torch.tensor([2])])[0].tolist() == [[2], [5]]


def test_several_outputs_come_back_flat() -> None:
    split = call("aten.split.Tensor", "a", "b", self=Ref("x"), split_size=2)
    assert [part.tolist() for part in split([torch.arange(4)])] == [[0, 1], [2, 3]]


def test_tokens_become_objects_and_the_device_is_the_ranks() -> None:
    made = call(
        "aten.zeros.default",
        size=(2,),
        dtype=Token(TokenKind.DTYPE, "bfloat16"),
        device=Token(TokenKind.DEVICE, "meta"),
        layout=Token(TokenKind.LAYOUT, "strided"),
    )
    (zeros,) = made([])
    assert (zeros.dtype, zeros.device.type) == (torch.bfloat16, "cpu")
    clone = call(
        "aten.clone.default",
        self=Ref("x"),
        memory_format=Token(TokenKind.MEMORY_FORMAT, "contiguous_format"),
    )
    assert clone([torch.ones(2, 3).t()])[0].is_contiguous()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aten.from_file.default", "may call"),
        ("os.system.default", "may call"),
        ("autograd.grad.default", "may call"),
        ("aten.no_such_operator.default", "does not have"),
        ("aten.add.no_such_overload", "does not have"),
        ("aten.__class__.mro", "does not have"),
        ("aten.add", "does not have"),
        ("aten.add_.Tensor", "writes into its inputs"),
    ],
)
def test_what_a_plan_may_not_call(name: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        resolve_operator(name)


def test_unknown_arguments_and_tokens() -> None:
    with pytest.raises(PlanError, match="no argument 'gamma'"):
        call("aten.add.Tensor", self=Ref("a"), other=Ref("b"), gamma=1)
    for kind, value in ((TokenKind.DTYPE, "load"), (TokenKind.LAYOUT, "sparse_coo")):
        with pytest.raises(PlanError, match="cannot run"):
            call("aten.zeros.default", **{"size": (1,), kind.value: Token(kind, value)})


X, Y = Ref("x"), Ref("y")
FLOAT32 = Token(TokenKind.DTYPE, "float32")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("aten.softmax.int", {"self": X, "dim": 1.0}, "takes 'dim' as int, not 1.0"),
        ("aten.softmax.int", {"self": X, "dim": None}, "takes 'dim' as int, not None"),
        ("aten.softmax.int", {"self": X}, "needs 'dim'"),
        ("aten.softmax.int", {"self": X, "dim": 1 << 63}, "takes 'dim' as int"),
        ("aten.softmax.int", {"self": None, "dim": 1}, "takes 'self' as Tensor, not None"),
        ("aten.softmax.int", {"self": (X,), "dim": 1}, "takes 'self' as Tensor"),
        ("aten.softmax.int", {"self": X, "dim": 1, "dtype": 6}, r"as Optional\[ScalarType\]"),
        ("aten.flip.default", {"self": X, "dims": 1}, r"takes 'dims' as List\[int\], not 1"),
        ("aten.flip.default", {"self": X, "dims": (1, "0")}, r"takes 'dims' as List\[int\]"),
        ("aten.flip.default", {"self": X, "dims": (X,)}, r"takes 'dims' as List\[int\]"),
        ("aten.cat.default", {"tensors": (X, None)}, r"takes 'tensors' as List\[Tensor\]"),
        ("aten.dropout.default", {"input": X, "p": "0.5", "train": True}, "'p' as float"),
        ("aten.dropout.default", {"input": X, "p": 0.5, "train": 2}, "'train' as bool, not 2"),
        ("aten.mul.Tensor", {"self": X, "other": "2"}, "'other' as Tensor, not '2'"),
        ("aten.add.Tensor", {"self": X, "other": Y, "alpha": X}, "'alpha' as number"),
        (
            "aten.conv2d.default",
            {"input": X, "weight": Y, "stride": (1, 1, 1)},
            r"'stride' as List\[int\] of length 2",
        ),
        ("aten.max_pool2d.default", {"self": X, "kernel_size": (1, 2, 3)}, "of length 2"),
        ("aten.mse_loss.default", {"self": X, "target": Y, "reduction": 3}, "from 0 to 2, not 3"),
        ("aten.mse_loss.default", {"self": X, "target": Y, "reduction": -1}, "from 0 to 2"),
        (
            "aten.grid_sampler.default",
            {"input": X, "grid": Y, "interpolation_mode": 7, "padding_mode": 0}
            | {"align_corners": False},
            "'interpolation_mode' as a number from 0 to 2, not 7",
        ),
        ("aten.gelu.default", {"self": X, "approximate": 1}, "'approximate' as str, not 1"),
        ("aten.bernoulli.default", {"self": X, "generator": 1}, "'generator' as"),
    ],
)
def test_arguments_that_a_schema_does_not_take(
    name: str, arguments: dict[str, Argument], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        call(name, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.sum.dim_IntList", {"self": X, "dim": None}),
        ("aten.sum.dim_IntList", {"self": X, "dim": 1, "keepdim": 1}),
        ("aten.sum.dim_IntList", {"self": X, "dim": ()}),
        ("aten.mul.Tensor", {"self": X, "other": 2.0}),
        ("aten.mul.Tensor", {"self": X, "other": True}),
        ("aten.index.Tensor", {"self": X, "indices": (None, Y)}),
        ("aten.max_pool2d.default", {"self": X, "kernel_size": (2,), "stride": ()}),
        ("aten.dropout.default", {"input": X, "p": 0, "train": False}),
        ("aten.sum.default", {"self": X, "dtype": FLOAT32}),
        ("aten.masked_fill.Scalar", {"self": X, "mask": Y, "value": float("-inf")}),
        ("aten.div.Tensor_mode", {"self": X, "other": Y, "rounding_mode": None}),
    ],
)
def test_arguments_that_pytorch_takes_although_they_look_odd(
    name: str, arguments: dict[str, Argument]
) -> None:
    x = torch.rand(1, 2, 4, 4) if "pool" in name else torch.rand(3, 4)
    tensors = {"index": torch.tensor([1]), "masked_fill": x > 0.5}
    y = tensors.get(name.split(".")[1], torch.rand(3, 4))
    assert call(name, **arguments)([x, y][: len(_inputs(arguments))])


def _inputs(arguments: dict[str, Argument]) -> list[Ref]:
    return [ref for argument in arguments.values() for ref in references(argument)]
