"""Recognition of mixtures of experts by their dataflow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import grouped_mm, silu

from autoshard.errors import SchemaError
from autoshard.graph import Graph, Output, export_model, graph_from_json, graph_to_json, load_graph
from autoshard.graph.experts import (
    COMBINE,
    DISPATCH,
    EXPERT_BIAS,
    EXPERT_OPERATORS,
    GROUPED_MM,
    groups_of_rows,
    ragged_values,
)

Step = Callable[..., torch.Tensor]


class Mixture(nn.Module):
    """A mixture of experts as transformers spells it.

    Args:
        experts: how many there are.
        within: what happens to rows between the two products.
        index: which token a row is of, by its place in the order.
        close: what happens to rows that are weighted and back in place.
        descending: whether experts come in the opposite order.
        returned: whether the rows leave too.
    """

    def __init__(
        self,
        experts: int = 8,
        *,
        within: Step = silu,
        index: Step = lambda order: order // 2,
        close: Step = lambda back: back.view(16, 2, -1).sum(1),
        descending: bool = False,
        returned: bool = False,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(32, experts)
        self.up = nn.Parameter(torch.randn(experts, 32, 64))
        self.down = nn.Parameter(torch.randn(experts, 64, 32))
        self.bias = nn.Parameter(torch.randn(experts, 32))
        self.within, self.index, self.close = within, index, close
        self.descending, self.returned = descending, returned

    def forward(self, x: torch.Tensor) -> Any:
        num_experts = len(self.bias)
        weights, ids = self.router(x).softmax(-1).topk(2)
        by_expert, order = torch.sort(ids.reshape(-1), descending=self.descending)
        rows = x[self.index(order)]
        picked = weights.reshape(-1)[order]
        counts = torch.histc(by_expert.int(), bins=num_experts, min=0, max=num_experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = self.within(grouped_mm(rows, self.up, offs=ends))
        made = (grouped_mm(hidden, self.down, offs=ends) + self.bias[by_expert]) * picked[:, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        result = self.close(made[inverse])
        return (result, made) if self.returned else result


def graph_of(model: nn.Module) -> Graph:
    model = model.to(torch.bfloat16)
    return load_graph(export_model(model, (torch.randn(16, 32, dtype=torch.bfloat16),)))


def own(graph: Graph) -> list[str]:
    return [node.operator for node in graph.nodes if node.operator in EXPERT_OPERATORS]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(Mixture())


def test_a_mixture_has_four_operators(graph: Graph) -> None:
    assert sorted(own(graph)) == sorted([DISPATCH, GROUPED_MM, GROUPED_MM, EXPERT_BIAS, COMBINE])
    left = {node.operator for node in graph.nodes}
    assert left.isdisjoint({"aten.sort.default", "aten.index.Tensor", "aten.index_put.default"})
    combine = graph.nodes[-1]
    assert combine.operator == COMBINE
    assert combine.argument("num_experts") == 8
    assert [graph.values[name].shape for name in combine.inputs] == [(8, 4, 32), (16, 2), (16, 2)]


def test_rows_and_nothing_else_are_ragged(graph: Graph) -> None:
    ragged = ragged_values(graph)
    assert {graph.values[name].shape[:2] for name in ragged} == {(8, 4)}
    assert len(ragged) == 6


@pytest.mark.parametrize(
    ("experts", "groups"), [(8, (8, 4)), (12, (4, 8)), (64, (32, 1)), (5, (1, 32))]
)
def test_groups_divide_experts_and_rows(experts: int, groups: tuple[int, int]) -> None:
    assert groups_of_rows(experts, 32) == groups


def test_experts_that_do_not_divide_the_rows_are_recognised() -> None:
    assert DISPATCH in own(graph_of(Mixture(12)))


def test_halves_of_rows_are_taken_apart_within_rows() -> None:
    def gate(rows: torch.Tensor) -> torch.Tensor:
        left, right = rows.chunk(2, -1)
        return torch.cat([silu(left) * right, rows[:, :32]], -1)

    found = graph_of(Mixture(within=gate))
    assert DISPATCH in own(found)
    joins = [
        node for node in found.nodes if node.operator in ("aten.chunk.default", "aten.cat.default")
    ]
    assert [node.argument("dim") for node in joins] == [2, 2]


@pytest.mark.parametrize(
    "other",
    [
        {"within": lambda rows: rows.cumsum(0)},
        {"within": lambda rows: rows - rows.mean(0)},
        {"within": lambda rows: rows * rows.new_ones(32, 1)},
        {"within": lambda rows: torch.cat([rows[:16], rows[16:]])},
        {"index": lambda order: order // 4},
        {"close": lambda back: back.view(16, 2, -1).sum(1, keepdim=True)},
        {"close": lambda back: back.view(16, 2, -1).amax(1)},
        {"close": lambda back: back.view(8, 4, -1).sum(1)},
        {"descending": True},
        {"returned": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_is_otherwise_stays_as_it_is(other: dict[str, Any]) -> None:
    found = graph_of(Mixture(**other))
    assert own(found) == []
    assert "aten.sort.default" in {node.operator for node in found.nodes}


def test_rows_do_not_leave_the_program(graph: Graph) -> None:
    rows = next(node.outputs[0] for node in graph.nodes if node.operator == DISPATCH)
    with pytest.raises(SchemaError, match="the graph returns"):
        ragged_values(replace(graph, outputs=(Output(rows),)))


@pytest.mark.parametrize("operator", ["aten.cumsum.default", "aten.linear.default", DISPATCH])
def test_rows_enter_nothing_that_mixes_them(graph: Graph, operator: str) -> None:
    nodes = tuple(
        replace(node, operator=operator) if node.operator == "aten.silu.default" else node
        for node in graph.nodes
    )
    with pytest.raises(SchemaError, match="does not act on each row separately"):
        ragged_values(replace(graph, nodes=nodes))


def test_a_document_keeps_them(graph: Graph) -> None:
    assert graph_from_json(graph_to_json(graph)) == graph
