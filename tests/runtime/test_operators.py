"""Calls of operators by name, and operators that a plan may not call."""

import pytest
import torch

from autoshard.errors import PlanError
from autoshard.graph import Argument, Node, Ref, Token, TokenKind
from autoshard.runtime.operators import OperatorCall, resolve_operator

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
            call("aten.zeros.default", size=(1,), dtype=Token(kind, value))
