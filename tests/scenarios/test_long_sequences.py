"""A long sequence on eight devices is sharded along the sequence, without hints."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from scenarios.alpa import operators
from support.attention import decoder, decoding, llama
from support.models import Case, graph_of, meta

from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.mesh import make_mesh
from autoshard.plan import Mode, Plan, PlanOptions
from autoshard.planner import make_plan

EIGHT = make_mesh((8,))
LLAMA_8B = {"width": 4096, "hidden": 14336, "heads": 32, "groups": 8, "vocabulary": 128256}
SEQUENCE, CACHED = 32768, 262144


def exported(build: Callable[[], Case]) -> Graph:
    model, inputs = meta(build)
    halves = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    return graph_of((model.bfloat16(), inputs | halves))


def planned(graph: Graph, mode: Mode) -> Plan:
    plan = make_plan(graph, EIGHT, PlanOptions(mode=mode))
    assert plan.found
    assert check_plan(plan, graph) == ()
    return plan


HEADS = (("S(1)", "S(1)", "S(1)"), "S(1)")
QUERIES = (("S(2)", "R", "R"), "S(2)")


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("build", [llama, decoder], ids=["mask", "causal"])
def test_one_long_sequence_is_cut(build: Callable[..., Case], mode: Mode) -> None:
    """All-to-alls take it to heads and back, or queries stay and keys are gathered."""
    graph = exported(partial(build, SEQUENCE, **LLAMA_8B))
    plan = planned(graph, mode)
    (cut,) = {
        (tuple(inputs[:3]), made)
        for inputs, made in operators(plan, graph, "scaled_dot_product_attention")
    }
    # A kernel that skips what is masked leaves the last rank more queries' work than the first.
    assert cut in ((HEADS,) if build is decoder else (HEADS, QUERIES))
    *layers, _ = operators(plan, graph, "linear")
    assert set(layers) == {(("S(1)", "R"), "S(1)")}
    norms = operators(plan, graph, "rms_norm") or operators(plan, graph, "rsqrt")
    assert {made for _, made in norms} == {"S(1)"}
    assert "all_to_all" in {c.kind for c in plan.collectives} or cut == QUERIES


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_long_cache_is_cut_along_its_keys(groups: int) -> None:
    """There are too few heads of keys for all devices."""
    graph = exported(partial(decoding, CACHED, width=4096, heads=32, groups=groups))
    plan = planned(graph, "inference")
    cut = (("R", "S(2)", "S(2)"), "R")
    assert operators(plan, graph, "scaled_dot_product_attention") == [cut]
    (inside,) = (node.inside for node in plan.stages[0].nodes if node.inside)
    # The largest score of each head, then 128 weighted values and a sum of weights.
    assert [(s.operation, s.nbytes) for s in inside] == [("max", 32 * 4), ("sum", 32 * 129 * 4)]


def test_a_cache_with_a_head_for_each_device_is_cut_by_heads() -> None:
    graph = exported(partial(decoding, CACHED, width=4096, heads=32, groups=8))
    cut = (("S(1)", "S(1)", "S(1)"), "S(1)")
    plan = planned(graph, "inference")
    assert operators(plan, graph, "scaled_dot_product_attention") == [cut]
