"""Interleaved shards: the tensors that can have them, and what operators compute then."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ops.calls import MakeExample, Prove
from support.models import gpt2, graph_of, llama, small_graph
from torch import nn

from autoshard.layouts import S
from autoshard.ops import interleaved_types, rule_for, strategies

THIRDS, HALVES, HEADS = (1, 1, 1), (1, 1), (1, 1, 1, 1)


class Halved(nn.Module):
    """One product whose output is taken apart along a dim."""

    def __init__(self, halve: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.halve = halve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.halve(self.up(x).tanh())
        return left * right


def offered(module: nn.Module, *shape: int) -> dict[tuple[int, ...], set[str]]:
    graph = graph_of((module, {"x": torch.randn(shape)}))
    return {shape: {str(t) for t in types} for shape, types in interleaved_types(graph).items()}


def test_the_projection_of_gpt2_has_three_sub_shards() -> None:
    assert interleaved_types(small_graph(partial(gpt2, layers=1))) == {
        (4, 8, 96): (S(2, THIRDS),),
        (32, 96): (S(1, THIRDS),),
        (96,): (S(0, THIRDS),),
        # A part of each of four heads.
        (4, 8, 32): (S(2, HEADS),),
        (32, 32): (S(1, HEADS), S(0, HEADS)),
    }


def test_views_suggest_a_part_of_each_factor() -> None:
    found = interleaved_types(small_graph(partial(llama, layers=1)))
    assert {t.sub_shards for types in found.values() for t in types} == {HEADS, 2 * HEADS}


def test_matrices_of_a_flat_parameter_may_be_sharded_inside() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.zeros(9 * 8 * 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bk,ekn->ebn", x, self.flat.view(9, 8, 8))

    assert f"S(0)/{'+'.join(9 * '1')}" in offered(Flat(), 4, 8)[9 * 8 * 8,]


def test_views_with_many_factors_suggest_nothing() -> None:
    """A part of each of 32 heads is no shard that anyone wants."""
    heads = nn.Sequential(nn.Linear(8, 128), nn.Unflatten(1, (32, 4)))
    graph = graph_of((heads, {"input": torch.randn(4, 8)}))
    assert not interleaved_types(graph)


@pytest.mark.parametrize(
    "halve",
    [
        lambda x: x.chunk(2, -1),
        lambda x: x.split(8, -1),
        lambda x: (x[:, :8], x[:, 8:]),
        lambda x: (x[:, :-8], x[:, -8:]),
        lambda x: (x.narrow(1, 0, 8), x.narrow(1, 8, 8)),
        lambda x: x.view(4, 2, 8).unbind(1),
        lambda x: (x.view(4, 2, 8)[:, 0], x.view(4, 2, 8)[:, 1]),
    ],
)
def test_however_a_product_is_halved_its_weight_has_two_sub_shards(
    halve: Callable[[torch.Tensor], Any],
) -> None:
    assert offered(Halved(halve), 4, 8) == {
        (4, 16): {"S(1)/1+1"},
        (16,): {"S(0)/1+1"},
        (16, 8): {"S(0)/1+1"},
    }


def test_an_input_has_two_sub_shards_if_a_dim_of_it_is_halved() -> None:
    """The batch is halved here, and no weight lies along it."""
    assert offered(Halved(lambda x: x.chunk(2, 0)), 4, 8) == {
        (4, 8): {"S(0)/1+1"},
        (4, 16): {"S(0)/1+1"},
    }


def test_what_is_made_inside_and_meets_no_weight_has_no_sub_shards() -> None:
    def halve(x: torch.Tensor) -> Any:
        return torch.cat([x, -x]).exp().chunk(2, 0)

    assert not offered(Halved(halve), 4, 8)


X = torch.randn(4, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
TAKEN_APART = [
    ("aten.split.Tensor", {"self": X, "split_size": 8, "dim": -1}, THIRDS, ["S(1)"] * 3),
    ("aten.chunk.default", {"self": X, "chunks": 2, "dim": 1}, HALVES, ["S(1)"] * 2),
    (
        "aten.split_with_sizes.default",
        {"self": X, "split_sizes": [12, 6, 6], "dim": 1},
        (2, 1, 1),
        ["S(1)"] * 3,
    ),
    (
        "aten.split_with_sizes.default",
        {"self": X, "split_sizes": [12, 12], "dim": 1},
        (2, 1, 1),
        ["S(1)", "S(1)/1+1"],
    ),
    ("aten.slice.Tensor", {"self": X, "dim": 1, "start": 8, "end": 16}, THIRDS, ["S(1)"]),
    ("aten.slice.Tensor", {"self": X, "dim": 1, "start": -16}, THIRDS, ["S(1)/1+1"]),
    ("aten.narrow.default", {"self": X, "dim": 1, "start": 16, "length": 8}, THIRDS, ["S(1)"]),
]


@pytest.mark.parametrize("case", TAKEN_APART)
def test_a_slice_of_each_section_gives_a_slice_of_each_piece(
    example: MakeExample, prove: Prove, case: tuple[Any, ...]
) -> None:
    operator, arguments, sub_shards, pieces = case
    call = example(operator, **arguments)
    prove(call)
    whole = S(1, sub_shards)
    interleaved = [[whole], *([S(1, HALVES)] for _ in pieces)]
    found = {str(s) for s in strategies(rule_for(call.call), (2,), interleaved=interleaved)}
    assert f"{whole} -> {' '.join(pieces)}" in found
    assert not any("S(1)" in text for text in map(str, strategies(rule_for(call.call), (2,))))


def test_sections_that_end_within_a_piece_are_not_sharded(example: MakeExample) -> None:
    case = example("aten.chunk.default", self=X, chunks=2, dim=1)
    interleaved = [[S(1, THIRDS)], [], []]
    found = strategies(rule_for(case.call), (2,), interleaved=interleaved)
    assert not any(t.sub_shards for s in found for t in s.inputs[0].types)


def test_what_is_joined_has_sub_shards(example: MakeExample, prove: Prove) -> None:
    case = example("aten.cat.default", tensors=[X, X[:, :12]], dim=1)
    prove(case)
    interleaved = [[], [], [S(1, (2, 1))]]
    found = {str(s) for s in strategies(rule_for(case.call), (2,), interleaved=interleaved)}
    assert "S(1) S(1) -> S(1)/2+1" in found


def test_an_inner_factor_is_sharded_into_as_many_sub_shards_as_the_outer_one_has(
    example: MakeExample, prove: Prove
) -> None:
    case = example("aten.view.default", self=X, size=[4, 3, 8])
    prove(case)
    found = {
        str(s) for s in strategies(rule_for(case.call), (2,), interleaved=[[S(1, THIRDS)], []])
    }
    assert "S(1)/1+1+1 -> S(2)" in found


def test_axes_have_the_same_sub_shards_of_a_dim(example: MakeExample) -> None:
    case = example("aten.tanh.default", self=X)
    types = [S(1, THIRDS), S(1, HALVES)]
    found = strategies(rule_for(case.call), (2, 2), interleaved=[types, types])
    sharded = [
        s.inputs[0] for s in found if s.inputs[0].types[0].dim == s.inputs[0].types[1].dim == 1
    ]
    assert {layout.sub_shards(1) for layout in sharded} == {(), THIRDS, HALVES}
    assert not any(layout.mixes_sub_shards for layout in sharded)


def test_where_the_place_of_an_element_matters_there_are_no_sub_shards(
    example: MakeExample,
) -> None:
    """A rank that looks up a slice of the vocabulary knows it by its first row."""
    case = example("aten.embedding.default", weight=X.T, indices=torch.arange(6))
    interleaved = [[S(0, THIRDS), S(1, HALVES)], [], [S(1, HALVES)]]
    found = strategies(rule_for(case.call), (2,), interleaved=interleaved)
    assert {str(t) for s in found for t in s.inputs[0].types if t.sub_shards} == {"S(1)/1+1"}
