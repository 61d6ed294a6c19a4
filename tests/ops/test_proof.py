"""The comparison of rules with execution, and wrong rules that it must reject."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.calls import MakeExample, Prove

from autoshard.layouts import Layout
from autoshard.ops import OperatorRule, Reductions, Strategy, axis_rules, rule_for, strategies


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def refuted(prove: Prove, example: Any, **changes: Any) -> None:
    with pytest.raises(AssertionError, match="is wrong"):
        prove(example, replace(rule_for(example.call), **changes))


def test_scan_over_a_sharded_dim_is_refuted(example: MakeExample, prove: Prove) -> None:
    refuted(prove, example("aten.cumsum.default", self=real(4, 8), dim=-1), whole=frozenset())


@pytest.mark.parametrize("text", ["max sum", "max sum*2 | sum", "sum max | sum", "max sum |"])
def test_softmax_with_other_collectives_than_it_runs_is_refuted(
    example: MakeExample, prove: Prove, text: str
) -> None:
    call = example("aten.softmax.int", self=real(4, 8), dim=-1)
    (rows,), (columns,) = rule_for(call.call).inputs[0]
    wrong = Reductions.of(text, over=[columns], per=[rows], itemsize=8)
    refuted(prove, call, reduced=wrong)


def test_result_of_statistics_is_not_a_sum(example: MakeExample, simulation: Any) -> None:
    """Each rank has the whole logarithm, whose gradient is the same on all of them."""
    call = example("aten.logsumexp.default", self=real(4, 8), dim=[1])
    (right,) = (s for s in strategies(rule_for(call.call), (2,)) if str(s).startswith("S(1)"))
    assert str(right) == "S(1) -> I"
    simulation(call, right, (2,)).check()
    for other in ("R", "P"):
        with pytest.raises(AssertionError):
            simulation(call, replace(right, outputs=(Layout.parse(other),)), (2,)).check()


def test_nonlinear_operator_on_partial_values_is_refuted(
    example: MakeExample, prove: Prove
) -> None:
    refuted(prove, example("aten.gelu.default", self=real(4, 8)), linear=(frozenset({0}),))


def test_bias_that_enters_a_sum_on_every_rank_is_refuted(
    example: MakeExample, prove: Prove
) -> None:
    call = example("aten.linear.default", input=real(4, 8), weight=real(4, 8), bias=real(4))
    refuted(prove, call, addends=frozenset())


def test_product_that_is_claimed_jointly_linear_is_refuted(
    example: MakeExample, prove: Prove
) -> None:
    call = example("aten.mul.Tensor", self=real(4, 8), other=real(4, 8))
    refuted(prove, call, linear=(frozenset({0, 1}),))


def test_causal_attention_over_sharded_keys_is_refuted(example: MakeExample, prove: Prove) -> None:
    heads = {name: real(2, 2, 8, 4) for name in ("query", "key", "value")}
    call = example("aten.scaled_dot_product_attention.default", **heads, is_causal=True)
    keys = frozenset(rule_for(call.call).inputs[1][2])
    refuted(prove, call, whole=frozenset(), contracted=keys)


def test_reshape_with_a_wrong_factor_is_refuted(example: MakeExample, prove: Prove) -> None:
    call = example("aten.reshape.default", self=real(4, 8), shape=[32])
    rule = OperatorRule({"a": 4, "b": 8}, ((("a",), ("b",)),), ((("b", "a"),),))
    with pytest.raises(AssertionError, match="is wrong"):
        prove(call, rule)


def test_mean_over_unequal_counts_is_refuted(example: MakeExample, prove: Prove) -> None:
    target = torch.tensor([1, -100, -100, -100, 2, 0, 1, 2])
    call = example("aten.cross_entropy_loss.default", self=real(8, 3), target=target)
    free = OperatorRule(
        {"n": 8, "c": 3},
        ((("n",), ("c",)), (("n",),)),
        ((),),
        contracted=frozenset("n"),
        whole=frozenset("c"),
    )
    with pytest.raises(AssertionError, match="is wrong"):
        prove(call, free)


def test_gradient_alone_refutes(example: MakeExample, simulation: Any) -> None:
    """The values are right, but a whole input whose gradient is partial is not invariant."""
    call = example("aten.linear.default", input=real(4, 8), weight=real(4, 8))
    sharded = {"sizes": {}, "outputs": (Layout.parse("S(0)"),)}
    right = Strategy(inputs=(Layout.parse("S(0)"), Layout.parse("R")), **sharded)
    wrong = Strategy(inputs=(Layout.parse("S(0)"), Layout.parse("I")), **sharded)
    simulation(call, right, (2,)).check()
    with pytest.raises(AssertionError):
        simulation(call, wrong, (2,)).check()


def test_slices_of_a_dropout_differ_and_copies_agree(example: MakeExample, simulation: Any) -> None:
    ones = torch.ones(8, 64, dtype=torch.float64)
    call = example("aten.dropout.default", input=ones, p=0.5, train=True)
    found = {str(s): s for s in strategies(rule_for(call.call), (2, 2))}
    run = simulation(call, found["S(0),R -> S(0),R"], (2, 2))
    outputs = {at: run.run_rank(at, (ones[:4],))[0] for at in ((0, 0), (0, 1), (1, 0))}
    assert torch.equal(outputs[0, 0], outputs[0, 1])
    assert not torch.equal(outputs[0, 0], outputs[1, 0])


def test_terms_of_a_sum_share_a_dropout(example: MakeExample, simulation: Any) -> None:
    values = real(8, 64)
    call = example("aten.dropout.default", input=values, p=0.5, train=True)
    partial = next(s for s in strategies(rule_for(call.call), (2,)) if str(s) == "P -> P")
    run, term = simulation(call, partial, (2,)), torch.full_like(values, 3.0)
    total = run.run_rank((0,), (term,))[0] + run.run_rank((1,), (values - term,))[0]
    kept = total != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(total[kept], 2 * values[kept])


@settings(max_examples=15)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_reshape_between_any_two_shapes(
    example: MakeExample, prove: Prove, before: list[int], data: Any
) -> None:
    """Merges and splits at random places of the row of prime factors."""
    primes = [p for size in before for p in _primes(size)]
    order = data.draw(st.permutations(primes))
    after, numel = [], math.prod(before)
    for prime in order:
        if after and data.draw(st.booleans()):
            after[-1] *= prime
        else:
            after.append(prime)
    values = torch.arange(numel, dtype=torch.float64).reshape(before)
    prove(example("aten.reshape.default", self=values, shape=after))


def _primes(size: int) -> list[int]:
    return {1: [1], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3]}[size]


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 2)), min_size=1, max_size=3),
    st.integers(0, 2),
)
def test_broadcasting_of_any_two_shapes(
    example: MakeExample, prove: Prove, dims: list[tuple[int, int]], dropped: int
) -> None:
    left = [1 if which == 0 else size for size, which in dims]
    right = [1 if which == 1 else size for size, which in dims][min(dropped, len(dims)) :]
    prove(example("aten.mul.Tensor", self=real(*left), other=real(*right)))


def test_shards_nest_in_both_orders(example: MakeExample) -> None:
    call = example("aten.neg.default", self=real(8)).call
    found = {str(strategy) for strategy in strategies(rule_for(call), (2, 2))}
    assert {"S(0),S(0) -> S(0),S(0)", "S(0),S(0);1>0 -> S(0),S(0);1>0"} <= found


def test_minor_factor_is_sharded_once_the_major_is_used_up(example: MakeExample) -> None:
    call = example("aten.reshape.default", self=real(2, 8), shape=[16]).call
    assert {str(rule) for rule in axis_rules(rule_for(call), 2)} == {
        "I->I",
        "R->R",
        "S(0)->S(0)",
        "P->P",
    }
    assert "S(0),S(1) -> S(0),S(0)" in {str(s) for s in strategies(rule_for(call), (2, 4))}
