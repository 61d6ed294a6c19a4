"""Tokens and model FLOPs of a step, against a computation by hand."""

import pytest
from support.meshes import SLOW, slow_devices
from support.models import Planner, gpt2, meta, mlp, small_graph

from autoshard.pricing.throughput import batch_of, plan_work


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_model_flops_of_gpt2_are_those_of_its_products(planned: Planner, mode: str) -> None:
    batch, sequence, hidden, layers, vocabulary = 4, 8, 32, 2, 64
    plan = planned(small_graph(gpt2), slow_devices(a=2), mode=mode)
    tokens = batch * sequence
    weights = layers * 12 * hidden**2 + hidden * vocabulary
    causal_pairs = batch * sequence * (sequence + 1) / 2
    forward = 2 * weights * tokens + layers * 4 * hidden * causal_pairs
    expected = forward * (3 if mode == "training" else 1)
    assert plan_work(plan).flops == {"float32": pytest.approx(expected, rel=0.02)}
    share = expected / (2 * SLOW.peak_flops["float32"] * plan.costs.total)
    assert plan.performance.mfu == pytest.approx(share, rel=0.02)
    assert plan.performance.tokens_per_second == pytest.approx(tokens / plan.costs.total)
    found = batch_of(plan)
    assert found is not None
    assert (found.samples, found.tokens) == (batch, tokens)


def test_floating_inputs_are_samples(planned: Planner) -> None:
    plan = planned(meta(mlp, 16), slow_devices(a=2), micro_batches=2)
    found = batch_of(plan)
    assert found is not None
    assert (found.samples, found.tokens) == (32, None)
