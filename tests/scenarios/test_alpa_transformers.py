"""Scenarios B: transformers under Alpa's costs; ids as in docs/scenarios.csv."""

import pytest
from scenarios.alpa import (
    ONLY_ALL_REDUCES,
    all_reduce,
    alpa_mesh,
    counts,
    operators,
    optimal,
    parameters,
    price,
    user_inputs,
)
from scenarios.architectures import bert, empty, graph_of, masked_lm, tied_embedding
from torch import nn

from autoshard.mesh import AlphaBeta, Axis, Device, Link, Mesh, Topology
from autoshard.plan import Plan

TALL_AND_FLAT = pytest.mark.parametrize("mesh", [(4, 1), (1, 4)], ids=["4x1", "1x4"])

MEGATRON = {"qkv.weight": 0, "out.weight": 1, "fc1.weight": 0, "fc2.weight": 1}
"""The dim that the published answer cuts of each weight of a layer."""


def cut_dims(plan: Plan, axis: int) -> dict[str, str]:
    """The part for one axis of each product's weight, by its name within the layer."""
    return {
        name: layout.split(",")[axis]
        for full, layout in parameters(plan).items()
        for name in MEGATRON
        if full.endswith(name)
    }


@TALL_AND_FLAT
def test_b1_long_batches_are_data_parallel(mesh: tuple[int, int]) -> None:
    plan = optimal(bert(64, 64, 32, 8), alpa_mesh(*mesh))
    assert set(parameters(plan).values()) == {"I,I"}
    assert counts(plan) == {"all_reduce": 1}


@TALL_AND_FLAT
def test_b2_small_batches_are_megatron_with_sequence_parallelism(mesh: tuple[int, int]) -> None:
    """Weights as published, and 4 reductions per layer less the first layer's input.

    The layer norms are cut too, which Alpa does not ask for: each all-reduce is a
    reduce-scatter and a gather around them at the same bytes, and their own gradients are
    one bucket more. With that bucket the price is the published one.
    """
    plan = optimal(bert(8, 8, 128, 8), alpa_mesh(*mesh))
    assert cut_dims(plan, mesh.index(4)) == {n: f"S({dim})" for n, dim in MEGATRON.items()}
    assert counts(plan) == {"reduce_scatter": 7, "all_gather": 7, "all_reduce": 1}
    norms = 8 * all_reduce(128 * 4)
    assert price(plan) == pytest.approx(344071.07 + norms, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "published"),
    [((8, 8, 128, 8), 344071.07), ((64, 64, 32, 8), 5505031.07), ((1, 64, 32, 8), 86023.07)],
    ids=["B2", "B6", "B6 batch 1"],
)
def test_b2_b6_all_reduces_alone_have_the_published_price(
    sizes: tuple[int, int, int, int], published: float
) -> None:
    pins = {f"*.{name}": f"S({dim}),*" for name, dim in MEGATRON.items()}
    plan = optimal(
        bert(*sizes),
        alpa_mesh(4, 1),
        pins={"parameters": pins},
        forbid=ONLY_ALL_REDUCES,
        skip_fully_replicated=False,
        batch_axis="a1",
    )
    assert counts(plan) == {"all_reduce": 7}
    assert price(plan) == pytest.approx(published)


def test_b6_the_batch_on_an_axis_of_four_is_data_parallel() -> None:
    plan = optimal(bert(64, 64, 32, 8), alpa_mesh(4, 1), batch_axis="a0")
    assert set(parameters(plan).values()) == {"I,I"}
    assert counts(plan) == {"all_reduce": 1}


def test_b6_the_batch_on_an_axis_of_one_cuts_the_sequence() -> None:
    """Better than the published 5505031.07: Alpa does not look for it.

    Positions are cut between the attentions, heads inside, as in DeepSpeed-Ulysses:
    all-to-alls move a rank's share where Alpa's all-reduces move whole activations.
    """
    graph = bert(64, 64, 32, 8)
    plan = optimal(graph, alpa_mesh(1, 4), batch_axis="a0")
    assert price(plan) < 5505031.07 / 3
    assert all(made == "I,S(1)" for _, made in operators(plan, graph, "layer_norm"))
    attentions = operators(plan, graph, "scaled_dot_product_attention")
    assert all(made == "I,S(1)" for _, made in attentions)
    assert counts(plan)["all_to_all"] == 4


def test_b6_one_sample_is_megatron() -> None:
    """As B2: the published price, and the gradients of the layer norms."""
    plan = optimal(bert(1, 64, 32, 8), alpa_mesh(1, 4), batch_axis="a0")
    assert counts(plan) == {"reduce_scatter": 7, "all_gather": 7, "all_reduce": 1}
    assert price(plan) == pytest.approx(86023.07 + 8 * all_reduce(32 * 4), rel=1e-3)


def test_b7_a_tied_embedding_and_its_softmax_are_vocabulary_parallel() -> None:
    """The price is the published one less an all-reduce: no maximum is subtracted.

    The loss is the second of the two small sums, so it stays partial and is summed as a
    scalar over both axes.
    """
    graph = tied_embedding(8, 8, 8, 1024, as_sums=True)
    pins = {"parameters": {"*": "I,S(0)"}}
    plan = optimal(graph, alpa_mesh(2, 2), batch_axis="a0", pins=pins)
    assert {kind for kind, count in counts(plan).items() if count} == {"all_reduce"}
    assert user_inputs(plan)["ids"] == "S(0),R"
    ((_, scores),) = operators(plan, graph, "linear")
    assert scores == "S(0),S(2)"
    maximum = all_reduce(8 * 8 * 4 // 2, 2)
    assert price(plan) == pytest.approx(18693.05 - maximum, rel=1e-3)
    assert price(plan) == pytest.approx(18693.05, rel=0.01)


def test_b7_a_cross_entropy_over_a_cut_vocabulary_is_the_published_plan() -> None:
    """Ours sums the exponentials and the score of the label in one all-reduce."""
    graph = tied_embedding(8, 8, 8, 1024, as_sums=False)
    pins = {"parameters": {"*": "I,S(0)"}}
    plan = optimal(graph, alpa_mesh(2, 2), batch_axis="a0", pins=pins)
    assert {kind for kind, count in counts(plan).items() if count} == {"all_reduce"}
    assert [taken[0] for taken, _ in operators(plan, graph, "cross_entropy_loss")] == ["S(0),S(1)"]
    label = all_reduce(2 * 8 * 8 * 4 // 2, 2) - all_reduce(8 * 8 * 4 // 2, 2)
    assert price(plan) == pytest.approx(18693.05 + label, rel=1e-3)
    assert price(plan) == pytest.approx(18693.05, rel=0.01)


def test_b7_the_vocabulary_over_both_axes_costs_half_of_the_published_plan() -> None:
    """No table is replicated, so no gradient of it is reduced, and no axis is idle."""
    graph = tied_embedding(8, 8, 8, 1024, as_sums=True)
    plan = optimal(graph, alpa_mesh(2, 2), pins={"parameters": {"*": "S(0),S(0)"}})
    ((_, scores),) = operators(plan, graph, "linear")
    assert scores == "S(2),S(2)"
    assert price(plan) < 18693.05 / 2


@TALL_AND_FLAT
@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "cut at rest"])
def test_b10_a_masked_language_model_is_data_parallel(mesh: tuple[int, int], *, cut: bool) -> None:
    """Cut at rest, no parameter is left whole: the published answers leave one or three."""
    pins = {"parameters": {"*": "S(0),S(0)"} if cut else {}}
    plan = optimal(masked_lm(32, 32, 16, 4, 128), alpa_mesh(*mesh), pins=pins)
    assert all(("S" in layout) == cut for layout in parameters(plan).values())
    expected = {"all_gather": 1, "reduce_scatter": 1} if cut else {"all_reduce": 1}
    assert counts(plan) == expected


BYTES_ONLY = Mesh(
    (Axis("tp", 4),),
    Topology(
        "bytes only",
        Device("bytes only", {"float32": 1e30}, memory_bandwidth=1.0, memory=1 << 50),
        (Link("unused", None, bandwidth=1e30, latency=0.0),),
        backend="gloo",
    ),
    AlphaBeta((0.0,), (0.0,)),
)
"""Nothing costs but bytes that are read and written."""


@pytest.mark.parametrize(
    ("tokens", "features", "rows", "weight"),
    [(256, 128, "S(0)", "R"), (128, 256, "R", "S(0)")],
    ids=["sequence parallel", "column parallel"],
)
def test_b14_a_product_cuts_the_larger_of_tokens_and_features(
    tokens: int, features: int, rows: str, weight: str
) -> None:
    """M tokens and N features: a rank reads MK + KN/T or MK/T + KN, equal where M = N."""
    layer = nn.Linear(32, features, bias=False, device="meta")
    graph = graph_of(layer, input=empty(tokens, 32))
    plan = optimal(graph, BYTES_ONLY, mode="inference")
    (((x, w), _),) = operators(plan, graph, "linear")
    assert (x, w) == (rows, weight)


def test_b14_the_two_cuts_meet_where_tokens_equal_features() -> None:
    layer = nn.Linear(32, 128, bias=False, device="meta")
    graph = graph_of(layer, input=empty(128, 32))
    times = [
        optimal(graph, BYTES_ONLY, mode="inference", pins={"nodes": {"linear": pin}})
        .stages[0]
        .nodes[0]
        .time
        for pin in ("S(0) R -> S(0)", "R S(0) -> S(1)")
    ]
    assert times[0] == pytest.approx(times[1])
