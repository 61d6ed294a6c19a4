"""Rules of mixtures of experts, compared with the exported operators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from ops.calls import Values, make_example
from ops.pieces import Coordinate, Pieces, assemble, distribute, share_of, slice_of
from ops.simulation import Simulation, prove_rule
from support.expert_operators import ordered

from autoshard.graph.experts import groups_of_rows
from autoshard.layouts import Kind, Layout, R
from autoshard.ops import rule_for, saved_tensors, strategies

VALUES = Values(7)
real = VALUES.real


@dataclass(frozen=True)
class Sizes:
    """Of a mixture; the last expert of the first kind has no rows."""

    tokens: int
    slots: int
    experts: int
    width: int = 8

    def ids(self) -> torch.Tensor:
        rows = [
            torch.randperm(self.experts - 1, generator=VALUES.generator) for _ in range(self.tokens)
        ]
        return torch.stack(rows)[:, : self.slots]

    def arguments(self, operator: str) -> dict[str, Any]:
        groups = groups_of_rows(self.experts, self.tokens * self.slots)
        ids = {"ids": self.ids()}
        if operator == "dispatch":
            return {"tokens": real(self.tokens, self.width), "num_experts": self.experts} | ids
        if operator == "grouped_mm":
            matrices = real(self.experts, self.width, 2 * self.width)
            return {"rows": real(*groups, self.width), "matrices": matrices} | ids
        if operator == "expert_bias":
            return {"bias": real(self.experts, self.width)} | ids
        weights = real(self.tokens, self.slots)
        rows = {"rows": real(*groups, self.width), "weights": weights}
        return rows | ids | {"num_experts": self.experts}


class OfRows(Simulation):
    """A simulation in which ranks have the rows of their experts, or of their tokens."""

    def _distribute(self, tensor: torch.Tensor, layout: Layout, kinds: Mapping[Kind, str]) -> Any:
        if not self._is_ragged(tuple(tensor.shape)):
            return super()._distribute(tensor, layout, kinds)
        rows = tensor.reshape(1, -1, tensor.shape[2])
        return distribute(rows, layout, self.mesh, kinds, self._place_of)

    def _assemble(
        self, pieces: Pieces, layout: Layout, shape: tuple[int, ...], kinds: Mapping[Kind, str]
    ) -> torch.Tensor:
        if not self._is_ragged(shape):
            return super()._assemble(pieces, layout, shape, kinds)
        rows = (1, shape[0] * shape[1], shape[2])
        return assemble(pieces, layout, self.mesh, rows, kinds, place_of=self._place_of).reshape(
            shape
        )

    @property
    def _ids(self) -> torch.Tensor:
        return self.example.values[self.example.call.positions("ids")[0]]

    @property
    def _num_experts(self) -> int:
        call = self.example.call
        packet = call.operator.split(".")[1]
        if packet == "grouped_mm":
            return call.inputs[1].shape[0]
        return (
            call.inputs[0].shape[0] if packet == "expert_bias" else call.integer("num_experts", 0)
        )

    def _is_ragged(self, shape: tuple[int, ...]) -> bool:
        ragged = (*self.example.call.inputs[:1], *self.example.call.outputs)
        return len(shape) == 3 and shape in [tensor.shape for tensor in ragged]

    def _place_of(
        self, layout: Layout, shape: tuple[int, ...], mesh: tuple[int, ...], at: Coordinate
    ) -> tuple[Any, ...]:
        """The rows of a rank's slice of the experts and of the tokens, by expert."""
        experts, tokens = np.arange(self._num_experts), np.arange(len(self._ids))
        for axis in layout.sharding_axes(0):
            experts = share_of(experts, mesh[axis], at[axis])
        for axis in layout.sharding_axes(1):
            tokens = share_of(tokens, mesh[axis], at[axis])
        by_expert, order = ordered(self._ids)
        token = (order // self._ids.shape[1]).numpy()
        held = np.isin(by_expert.numpy(), experts) & np.isin(token, tokens)
        _, _, columns = slice_of(_only_width(layout), (1, 1, shape[2]), mesh, at)
        return np.ix_([0], np.flatnonzero(held), columns.ravel())


def _only_width(layout: Layout) -> Layout:
    """The layout of a tensor whose rows are all there."""
    types = tuple(t if t.dim == 2 else R for t in layout.types)
    kept = tuple(order for order in layout.nesting if layout.types[order[0]].dim == 2)
    return Layout(types, kept)


PLAIN, ODD = Sizes(24, 2, 8), Sizes(24, 2, 18)
EXPECTED = {
    "dispatch": {"S(0) S(0) -> S(1)", "R R -> S(0)", "S(0) R -> S(0)", "S(1) R -> S(2)"},
    "grouped_mm": {
        *("S(1) R S(0) -> S(1)", "S(0) S(0) R -> S(0)"),
        *("R S(2) R -> S(2)", "S(2) S(1) R -> P"),
    },
    "expert_bias": {"R S(0) -> S(1)", "S(0) R -> S(0)", "S(1) R -> S(2)"},
    "combine": {
        *("S(1) S(0) S(0) -> S(0)", "S(0) R R -> P"),
        *("S(0) R S(0) -> S(0)", "S(2) R R -> S(1)"),
    },
}
"""Options that shard something, on one axis."""


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", [PLAIN, ODD], ids=["groups of one", "groups of three"])
@pytest.mark.parametrize("operator", EXPECTED)
def test_rule(operator: str, sizes: Sizes) -> None:
    example = make_example(f"autoshard.{operator}.default", **sizes.arguments(operator))
    found = prove_rule(example, simulation=OfRows)
    shards = {text for text in found if "S(" in text}
    assert shards == EXPECTED[operator]


@pytest.mark.parametrize("operator", EXPECTED)
def test_what_backward_keeps_is_what_the_table_says(operator: str) -> None:
    example = make_example(f"autoshard.{operator}.default", **PLAIN.arguments(operator))
    call = example.call
    whole = next(iter(strategies(rule_for(call), (1,))))
    values = tuple(
        value.reshape(1, -1, value.shape[2]) if call.names[i] == "rows" else value
        for i, value in enumerate(example.values)
    )
    values = tuple(v.requires_grad_() if v.is_floating_point() else v for v in values)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        OfRows(example, whole, (1,)).run_rank((0,), values)
    saved = saved_tensors(call, [tensor.requires_grad for tensor in call.inputs])
    given = {value.untyped_storage().data_ptr(): i for i, value in enumerate(values)}
    shapes = [tensor.shape for tensor in (*call.inputs, *call.outputs)]
    extra = sum(extra.nbytes(shapes) for extra in saved.extras)
    # What nothing was done to is kept as it came in, and counted by itself.
    inputs = {given[place] for place in kept if place in given}
    alone = sum(nbytes for place, nbytes in kept.items() if place not in given)
    if operator == "combine":
        assert inputs == saved.inputs | {0}
        alone += call.inputs[0].nbytes
    else:
        assert inputs == saved.inputs
    assert alone == extra


@pytest.mark.parametrize("operator", ["dispatch", "combine"])
def test_tokens_and_their_ids_are_sharded_alike_outside_of_an_exchange(operator: str) -> None:
    """Ids that a rank's tokens are not among would tell it nothing of them."""
    example = make_example(f"autoshard.{operator}.default", **PLAIN.arguments(operator))
    call = example.call
    for strategy in strategies(rule_for(call), (2, 2)):
        layouts = dict(zip(call.names, strategy.inputs, strict=True))
        tokens = layouts.get("tokens", layouts.get("weights"))
        assert tokens is not None
        assert (
            layouts["ids"].sharding_axes(0)
            == tokens.sharding_axes(0)[: len(layouts["ids"].sharding_axes(0))]
        )
