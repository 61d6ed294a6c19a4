"""Random operators on simulated ranks: shards draw different numbers, replicas equal ones."""

from typing import Any

import pytest
import torch
from ops.calls import MakeExample

from autoshard.ops import rule_for, strategies

HALVES = torch.full((4, 256), 0.5, dtype=torch.float64)
SIZE = {"size": [4, 256]}
DRAWING = [
    ("aten.rand.default", SIZE),
    ("aten.randn.default", SIZE),
    ("aten.randint.default", {"high": 100} | SIZE),
    ("aten.randint.low", {"low": 1, "high": 100} | SIZE),
    ("aten.normal.float_float", {"mean": 1.0, "std": 2.0} | SIZE),
    ("aten.rand_like.default", {"self": HALVES}),
    ("aten.randn_like.default", {"self": HALVES}),
    ("aten.randint_like.default", {"self": HALVES, "high": 100}),
    ("aten.randint_like.low_dtype", {"self": HALVES, "low": 1, "high": 100}),
    ("aten.bernoulli.default", {"self": HALVES}),
    ("aten.bernoulli.p", {"self": HALVES, "p": 0.3}),
    ("aten.binomial.default", {"count": 8 * HALVES, "prob": HALVES}),
    ("aten.exponential.default", {"self": HALVES}),
    ("aten.uniform.default", {"self": HALVES}),
    ("aten.normal_functional.default", {"self": HALVES}),
    ("aten.normal.Tensor_float", {"mean": HALVES}),
    ("aten.normal.float_Tensor", {"mean": 0.0, "std": HALVES}),
    ("aten.normal.Tensor_Tensor", {"mean": HALVES, "std": HALVES}),
    ("aten.poisson.default", {"self": 8 * HALVES}),
    ("aten.dropout.default", {"input": HALVES, "p": 0.5, "train": True}),
    ("aten.native_dropout.default", {"input": HALVES, "p": 0.5, "train": True}),
    ("aten.multinomial.default", {"self": HALVES, "num_samples": 64, "replacement": True}),
]
MESH = (2, 2)


@pytest.mark.parametrize(("operator", "arguments"), DRAWING, ids=[c[0] for c in DRAWING])
def test_slices_differ_and_copies_agree(
    operator: str, arguments: dict[str, Any], example: MakeExample, simulation: Any
) -> None:
    made = example(operator, **arguments)
    found = {str(s.outputs[0]): s for s in strategies(rule_for(made.call), MESH)}
    run = simulation(made, found["S(0),R"], MESH)
    values = tuple(value[:2] for value in made.values)
    first, copy, other = (run.run_rank(at, values)[0] for at in ((0, 0), (0, 1), (1, 0)))
    whole = made.run(made.values)[0]
    assert first.shape == (2, *whole.shape[1:])
    assert first.dtype == whole.dtype
    assert torch.equal(first, copy)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_distributions_of_rows_are_sharded_by_row(example: MakeExample) -> None:
    made = example("aten.multinomial.default", self=HALVES, num_samples=4)
    found = {str(strategy) for strategy in strategies(rule_for(made.call), (2,))}
    assert found == {"I -> I", "R -> R", "S(0) -> S(0)"}
