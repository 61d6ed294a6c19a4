"""Dims among the arguments of operators: normalised calls compute what PyTorch computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dim_calls import RANKS, accepted_calls, dims_of, overloads
from support.evaluation import run_graph
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from autoshard.errors import SchemaError
from autoshard.graph import (
    Argument,
    DType,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    Ref,
    Tensor,
    Token,
    TokenKind,
    graph_from_json,
    graph_to_json,
)
from autoshard.graph.archive.parse import Body, Program
from autoshard.graph.dims import dim_arguments
from autoshard.graph.normalise import normalise
from autoshard.ops import has_rule

Check = Callable[..., Graph]


def test_dims_by_any_name_are_known() -> None:
    """Operators with a sharding rule whose dims are not known would keep negative ones."""
    for name in overloads():
        if has_rule(f"aten.{name}"):
            assert set(dims_of(name)) <= dim_arguments(f"aten.{name}").keys(), name


@pytest.mark.matrix
@pytest.mark.parametrize("name", overloads())
def test_negative_dims_are_those_of_pytorch(name: str) -> None:
    """Whatever the ranks of the tensors are, and whether dims are numbers or lists."""
    torch.manual_seed(0)
    accepted = 0
    for arguments, expected in accepted_calls(name):
        found = run_normalised(f"aten.{name}", arguments, expected)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-12, atol=0)
        accepted += 1
    assert accepted >= len(RANKS) - 1, "PyTorch has refused these calls"


def run_normalised(
    operator: str, arguments: dict[str, Any], expected: list[torch.Tensor]
) -> list[Any]:
    """The results of a program of one call, normalised and run by the project."""
    tensors: dict[str, torch.Tensor] = {}

    def abstract(value: Any) -> Argument:
        if isinstance(value, torch.Tensor):
            tensors[f"x{len(tensors)}"] = value
            return Ref(f"x{len(tensors) - 1}")
        if isinstance(value, list):
            return tuple(abstract(item) for item in value)
        if isinstance(value, torch.dtype):
            return Token(TokenKind.DTYPE, str(value).removeprefix("torch."))
        return value  # type: ignore[no-any-return]

    given = tuple((key, abstract(value)) for key, value in arguments.items())
    results = tuple(f"y{i}" for i in range(len(expected)))
    body = Body(
        tuple(tensors),
        (Node("call", operator, given, results),),
        tuple(map(Output, results)),
        dict(
            zip((*tensors, *results), map(described, (*tensors.values(), *expected)), strict=True)
        ),
    )
    inputs = tuple(Input(name, InputKind.USER, name) for name in tensors)
    return run_graph(normalise(Program(inputs, body)), nn.Module(), tensors)


def described(tensor: torch.Tensor) -> Tensor:
    return Tensor(tuple(tensor.shape), DType(str(tensor.dtype).removeprefix("torch.")))


class Weighted(nn.Module):
    """A function of a parameter and an input."""

    def __init__(self, function: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight, h)


BROADCAST: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "similarity of all pairs": (
        lambda t, h: functional.cosine_similarity(t, h[:, None], dim=-1),
        (16, 16),
    ),
    "similarity, counted from the front": (
        lambda t, h: functional.cosine_similarity(t, h[:, None], dim=2),
        (16, 16),
    ),
    "similarity with a vector": (
        lambda q, h: functional.cosine_similarity(q, h, dim=-1),
        (16,),
    ),
    "products of all pairs": (
        lambda t, h: torch.linalg.vecdot(t, h[:, None], dim=-2),
        (16, 16),
    ),
    "products of vectors": (lambda t, h: torch.linalg.vecdot(t, h[0], dim=-1), (16,)),
    "an empty tensor before a matrix": (
        lambda t, h: torch.cat([h.new_empty(0), h * t], dim=-2),
        (16,),
    ),
    "a stack": (lambda t, h: torch.stack([h * t, h], dim=-1), (16,)),
    "diagonals of matrices": (lambda t, h: torch.diag_embed(h * t, dim1=-3, dim2=-1), (16,)),
    "tiles, which have no dims": (lambda t, h: torch.tile(h * t, (3, 2)), (16,)),
    "a contraction": (lambda t, h: torch.tensordot(t, h, dims=([-3], [-1])), (16, 4, 2)),
    "a distance": (lambda t, h: functional.pairwise_distance(t, h[:, None]), (16, 16)),
}


@pytest.mark.parametrize("case", BROADCAST)
def test_dims_that_are_not_those_of_the_first_tensor(case: str, check_equal: Check) -> None:
    """Values and gradients of a model, exported and normalised."""
    torch.manual_seed(0)
    function, shape = BROADCAST[case]
    check_equal(Weighted(function, *shape), h=torch.randn(8, 16))


def written(t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Writes along dims that are counted from the end."""
    made = (h * t).cumsum(-1)
    made.cumsum_(-2)
    made.index_add_(-1, torch.arange(2).flip(0), h[:, :2] * t[:2])
    made.scatter_(-2, torch.zeros(1, 16, dtype=torch.long), h[-1:])
    made.select(-1, -2).mul_(2)
    made[-5:-2].transpose(-1, -2).add_(1)
    return made


def test_writes_along_negative_dims(check_equal: Check) -> None:
    torch.manual_seed(0)
    graph = check_equal(Weighted(written, 16), h=torch.randn(8, 16))
    for node in graph.nodes:
        dims = [node.argument(name) for name in dim_arguments(node.operator)]
        assert all(dim >= 0 for dim in dims if isinstance(dim, int)), node


class Reparametrised(nn.Module):
    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.inner = weight_norm(nn.Linear(16, 8), dim=dim)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(h).square()


@pytest.mark.parametrize("dim", [None, -1, 0, 1])
def test_weight_norms_over_all_dims(dim: int | None, check_equal: Check) -> None:
    check_equal(Reparametrised(dim), h=torch.randn(4, 16))


def document(operator: str, *shapes: tuple[int, ...], **arguments: Argument) -> Any:
    """The document of a program of one call whose result has the shape of its first tensor."""
    names = [f"x{i}" for i in range(len(shapes))]
    values = {name: Tensor(shape, DType.FLOAT32) for name, shape in zip(names, shapes, strict=True)}
    node = Node("call", operator, tuple(arguments.items()), ("y",))
    inputs = tuple(Input(name, InputKind.USER, name) for name in names)
    values["y"] = Tensor(shapes[0], DType.FLOAT32)
    return graph_to_json(Graph(inputs, (node,), (Output("y"),), values))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (document("aten.softmax.int", (4, 6), self=Ref("x0"), dim=2), "dim 2 is out of range"),
        (document("aten.softmax.int", (4, 6), self=Ref("x0"), dim=-3), "dim -3 is out of range"),
        (document("aten.flip.default", (4, 6), self=Ref("x0"), dims=(0, 5)), "dim 5 is out of"),
        (
            document("aten._weight_norm.default", (8, 16), (), v=Ref("x0"), g=Ref("x1"), dim=1),
            r"along dim 1 have shape \(1, 16\), not",
        ),
        (
            document(
                "aten._weight_norm.default", (8, 16), (8, 1), v=Ref("x0"), g=Ref("x1"), dim=-1
            ),
            r"along dim -1 have shape \(\), not",
        ),
        (
            document("aten._weight_norm.default", (8, 16), v=Ref("x0"), dim=0),
            r"have shape \(8, 1\), not \[\]",
        ),
    ],
)
def test_documents_with_impossible_dims_are_refused(program: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        graph_from_json(program)
