"""Scenarios C: experts and convolutions under Alpa's costs; ids as in docs/scenarios.csv."""

import pytest
from scenarios.alpa import (
    LOSS,
    ONLY_ALL_REDUCES,
    all_reduce,
    alpa_mesh,
    counts,
    operators,
    optimal,
    parameters,
    price,
)
from scenarios.architectures import convolutions, expert_lm, experts

TALL_AND_FLAT = pytest.mark.parametrize("mesh", [(4, 1), (1, 4)], ids=["4x1", "1x4"])


@TALL_AND_FLAT
def test_c1_experts_are_expert_parallel(mesh: tuple[int, int]) -> None:
    plan = optimal(experts(), alpa_mesh(*mesh))
    assert counts(plan) == {"all_to_all": 4, "all_reduce": 1}
    for name, layout in parameters(plan).items():
        wanted = "S(0)" if name.endswith((".wi", ".wo")) else "I"
        assert layout.split(",")[mesh.index(4)] == wanted, name
    assert price(plan) == pytest.approx(893965.09 + LOSS)


@TALL_AND_FLAT
def test_c4_a_language_model_with_experts(mesh: tuple[int, int]) -> None:
    plan = optimal(expert_lm(), alpa_mesh(*mesh), optimizer="adafactor")
    assert counts(plan) == {"all_to_all": 4, "all_reduce": 1}


def test_c4_with_parameters_cut_at_rest() -> None:
    """No tensor is left whole, and no gradient is all-reduced."""
    pins = {"parameters": {"*": "S(0)"}}
    plan = optimal(expert_lm(), alpa_mesh(4), optimizer="adafactor", pins=pins)
    assert counts(plan) == {"all_to_all": 4, "all_gather": 1, "reduce_scatter": 1}


def test_c4_data_parallelism_can_be_forced() -> None:
    pins = {"parameters": {"*": "I,I"}}
    plan = optimal(expert_lm(), alpa_mesh(4, 1), pins=pins, batch_axis="a0")
    assert counts(plan) == {"all_reduce": 1}


def test_c7_convolutions_without_batch_norm_are_data_parallel() -> None:
    plan = optimal(
        convolutions(3, 16, 16, 4, norm=False), alpa_mesh(4, 1), optimizer="sgd-momentum"
    )
    assert counts(plan) == {"all_reduce": 1}
    assert price(plan) == pytest.approx(3 * all_reduce(4 * 4 * 9 * 4) + LOSS)


def test_c7_batch_norms_share_their_statistics() -> None:
    """Data parallel: a bucket of gradients, and statistics of three norms.

    Published are two all-reduces per norm. Ours runs three: squares are summed around the
    mean, which must be known first.
    """
    graph = convolutions(3, 16, 16, 4, norm=True)
    plan = optimal(graph, alpa_mesh(4, 1), optimizer="sgd-momentum")
    assert {made for _, made in operators(plan, graph, "batch_norm")} == {"S(0),I"}
    assert counts(plan) == {"all_reduce": 1 + 3 * 3}
    statistics = 2 * all_reduce(4 * 4) + all_reduce(2 * 4 * 4)
    gradients = 3 * (all_reduce(4 * 4 * 9 * 4) + 2 * all_reduce(4 * 4))
    assert price(plan) == pytest.approx(gradients + 3 * statistics + LOSS)


@TALL_AND_FLAT
def test_c8_wide_convolutions_are_channel_parallel(mesh: tuple[int, int]) -> None:
    """One reduction less than layers; cut norms make each a reduce-scatter and a gather."""
    graph = convolutions(4, 8, 16, 256, norm=True)
    plan = optimal(graph, alpa_mesh(*mesh), optimizer="sgd-momentum")
    assert counts(plan) == {"reduce_scatter": 3, "all_gather": 3}
    axis = mesh.index(4)
    made = {out.split(",")[axis] for _, out in operators(plan, graph, "batch_norm")}
    assert made == {"S(1)"}


def test_c8_channels_in_turn_have_one_all_reduce_less_than_layers() -> None:
    weights = {f"body.{4 * layer}.weight": f"S({layer % 2}),*" for layer in range(4)}
    plan = optimal(
        convolutions(4, 8, 16, 256, norm=True),
        alpa_mesh(4, 1),
        pins={"parameters": weights},
        forbid=ONLY_ALL_REDUCES,
        skip_fully_replicated=False,
    )
    assert counts(plan) == {"all_reduce": 3}
