"""Scenarios A: data parallelism, tensor parallelism and ZeRO, under Alpa's costs.

Each id names one published scenario; docs/scenarios.csv lists them all, with those that
do not hold. `sum of all-reduces` are Alpa's objectives without its penalty on replicated
optimizer state, which stands for memory that we count as memory.
"""

from functools import partial
from typing import Any

import pytest
import torch
from scenarios.alpa import (
    LOSS,
    ONLY_ALL_REDUCES,
    all_gather,
    all_reduce,
    alpa_mesh,
    counts,
    operators,
    optimal,
    parameters,
    price,
    user_inputs,
)
from scenarios.architectures import empty, function_graph, mlp, trained
from torch import nn

from autoshard.checker import check_plan
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan

narrow = partial(mlp, layers=6, batch=256, width=32)
wide = partial(mlp, layers=6, batch=32, width=256)

GRADIENTS_NARROW = 6 * (all_reduce(32 * 32 * 4) + all_reduce(32 * 4))
GRADIENTS_WIDE = 6 * (all_reduce(256 * 256 * 4) + all_reduce(256 * 4))
ACTIVATIONS_WIDE = 5 * all_reduce(32 * 256 * 4)

TALL_AND_FLAT = pytest.mark.parametrize("mesh", [(4, 1), (1, 4)], ids=["4x1", "1x4"])

ALTERNATING = {
    f"body.{2 * layer}.weight": "S(0),*" if layer % 2 == 0 else "S(1),*" for layer in range(6)
}
"""The published answer to A2: columns in even layers, rows in odd ones."""

CUT_AT_REST = {"pins": {"parameters": {"*": "S(0),S(0)"}}}


def test_the_constants_are_the_published_objectives() -> None:
    """38139.12, 245765.05 and 2368635.12, less 3 for each of 37 replicated tensors."""
    assert pytest.approx(38139.12 - 3 * 37) == GRADIENTS_NARROW
    assert pytest.approx(245765.05) == ACTIVATIONS_WIDE
    assert pytest.approx(2368635.12 - 3 * 37) == GRADIENTS_WIDE


@TALL_AND_FLAT
def test_a1_small_weights_are_data_parallel(mesh: tuple[int, int]) -> None:
    plan = optimal(narrow(), alpa_mesh(*mesh))
    assert set(parameters(plan).values()) == {"I,I"}
    assert counts(plan) == {"all_reduce": 1}
    assert price(plan) == pytest.approx(GRADIENTS_NARROW + LOSS)


@TALL_AND_FLAT
def test_a2_large_weights_are_tensor_parallel(mesh: tuple[int, int]) -> None:
    """Columns only: a gather and the reduce-scatter of its gradient between two layers.

    Alpa alternates columns and rows with 5 all-reduces. Under its own prices the two cost
    the same but for the constants; where no operator may be done everywhere, and so
    neither may the ReLU behind a row, columns only are the cheaper.
    """
    plan = optimal(wide(), alpa_mesh(*mesh))
    assert all("S" in layout for layout in parameters(plan).values())
    assert counts(plan) == {"all_gather": 5, "reduce_scatter": 5}
    assert price(plan) == pytest.approx(ACTIVATIONS_WIDE, rel=1e-4)


def test_a2_columns_and_rows_in_turn_have_one_all_reduce_less_than_layers() -> None:
    plan = optimal(
        wide(),
        alpa_mesh(4, 1),
        pins={"parameters": ALTERNATING},
        forbid=ONLY_ALL_REDUCES,
        skip_fully_replicated=False,
    )
    assert counts(plan) == {"all_reduce": 5}
    assert price(plan) == pytest.approx(ACTIVATIONS_WIDE)


@pytest.mark.parametrize(
    ("mesh", "ranks"), [((4, 1), "S(0),*"), ((2, 2), "S(0),S(0)")], ids=["4x1", "2x2"]
)
def test_a4_data_parallelism_can_be_forced(mesh: tuple[int, int], ranks: str) -> None:
    """On 2x2 each gradient is reduced over both axes: Alpa sees one flat axis of 4."""
    graph = wide()
    pins = {
        "parameters": {"*": "I,I"},
        "inputs": {"*": ranks},
        "nodes": {"linear*": f"{ranks} R,R R,R -> {ranks}"},
    }
    plan = optimal(graph, alpa_mesh(*mesh), pins=pins)
    assert set(parameters(plan).values()) == {"I,I"}
    sizes = [size for size in mesh if size > 1]
    assert counts(plan) == {"all_reduce": len(sizes)}
    gradients = [6 * (all_reduce(256 * 256 * 4, n) + all_reduce(256 * 4, n)) for n in sizes]
    assert price(plan) == pytest.approx(sum(gradients), rel=1e-4)


def test_a5_the_batch_on_an_axis_of_four_is_data_parallel() -> None:
    plan = optimal(wide(), alpa_mesh(4, 1), batch_axis="a0")
    assert set(parameters(plan).values()) == {"I,I"}
    assert counts(plan) == {"all_reduce": 1}
    assert price(plan) == pytest.approx(GRADIENTS_WIDE + LOSS)


def test_a5_the_batch_on_an_axis_of_one_is_tensor_parallel() -> None:
    plan = optimal(wide(), alpa_mesh(1, 4), batch_axis="a0")
    assert counts(plan) == {"all_gather": 5, "reduce_scatter": 5}
    assert price(plan) == pytest.approx(ACTIVATIONS_WIDE, rel=1e-4)


@TALL_AND_FLAT
@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_a6_a10_sharded_state_gathers_and_reduce_scatters_once(
    mesh: tuple[int, int], optimizer: str
) -> None:
    """Gradients, state and parameters are cut alike, so all state is sharded."""
    plan = optimal(narrow(), alpa_mesh(*mesh), optimizer=optimizer, **CUT_AT_REST)
    assert all("S" in layout for layout in parameters(plan).values())
    assert counts(plan) == {"all_gather": 1, "reduce_scatter": 1}
    assert price(plan) == pytest.approx(GRADIENTS_NARROW, rel=1e-3)


@TALL_AND_FLAT
def test_a9_parameters_are_gathered_again_for_backward(mesh: tuple[int, int]) -> None:
    """ZeRO-3, where it is asked for and where memory asks for it.

    Of six weights five are needed in backward: nobody asks for the gradient of the input.
    """
    gathered_twice = {"all_gather": 2, "reduce_scatter": 1}
    always = optimal(narrow(), alpa_mesh(*mesh), reshard_after_forward="always", **CUT_AT_REST)
    assert all("S" in layout for layout in parameters(always).values())
    assert counts(always) == gathered_twice
    assert sum(resharding.regather for resharding in always.stages[0].reshardings) == 5
    assert price(always) == pytest.approx(GRADIENTS_NARROW, rel=1e-3)
    assert always.costs.recompute == pytest.approx(5 * all_gather(32 * 32 * 4))

    assert always.memory is not None
    tight = make_plan(
        narrow(),
        alpa_mesh(*mesh),
        PlanOptions(
            **CUT_AT_REST
            | {
                "optimizer": "adam",
                "skip_fully_replicated": True,
                "activation_checkpointing": "never",
                "memory_budget": always.memory.peak,
            }
        ),
    )
    assert check_plan(tight) == ()
    assert counts(tight) == gathered_twice
    assert tight.memory is not None
    assert tight.memory.peak <= always.memory.peak
    # The last weight is needed again at once: memory does not ask for its second gather.
    differing = [
        (one.value, one.regather)
        for one, other in zip(
            tight.stages[0].reshardings, always.stages[0].reshardings, strict=True
        )
        if one != other
    ]
    assert differing == [("p_body_10_weight", False)]


@TALL_AND_FLAT
def test_a7_sharded_state_of_large_weights(mesh: tuple[int, int]) -> None:
    """Five reductions, and as many gathers as reduce-scatters: of activations here."""
    found = counts(optimal(wide(), alpa_mesh(*mesh), **CUT_AT_REST))
    assert found["all_reduce"] + found["reduce_scatter"] == 5
    assert found["reduce_scatter"] == found["all_gather"]
    assert found.total() == 10


def test_a11_a_dropout_mask_is_drawn_in_slices() -> None:
    shape = (32, 32, 16)
    body = nn.Sequential(
        nn.Linear(16, 16, bias=False), nn.Dropout(0.1), nn.Linear(16, 16, bias=False)
    )
    graph = trained(body, shape, shape)
    plan = optimal(graph, alpa_mesh(4), optimizer="sgd")
    assert counts(plan) == {"all_reduce": 1}
    ((taken, made),) = operators(plan, graph, "dropout")
    assert (taken, made) in {(("S(0)",), "S(0)"), (("S(1)",), "S(1)")}
    assert price(plan) < 1e6


class Picked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[:, torch.arange(16)])


def test_a12_a_gather_runs_on_slices() -> None:
    graph = trained(Picked(), (256, 32), (256, 16))
    plan = optimal(graph, alpa_mesh(4), optimizer="sgd")
    assert counts(plan) == {"all_reduce": 1}
    ((taken, made),) = operators(plan, graph, "index")
    assert (taken[0], made) == ("S(0)", "S(0)")


FUNCTIONS: dict[str, tuple[Any, tuple[torch.Tensor, ...], list[str], str]] = {
    "A13 elementwise": (lambda x: x + 1, (empty(128, 128),), ["S(0)"], "S(0)"),
    "A14 argmax": (lambda a: a.argmax(0), (empty(144, 144),), ["S(1)"], "S(0)"),
    "A15 gemv": (
        lambda a, b: a @ b,
        (empty(128), empty(128, 256)),
        ["R", "S(1)"],
        "S(0)",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a13_a14_a15_functions_are_cut_without_communication(name: str) -> None:
    function, args, inputs, output = FUNCTIONS[name]
    plan = optimal(function_graph(function, *args), alpa_mesh(4), mode="inference")
    assert list(user_inputs(plan).values()) == inputs
    assert plan.stages[0].outputs[0].layout == output
    assert plan.collectives == ()
    assert price(plan) == 0


@pytest.mark.parametrize("ranks", [1, 4])
def test_a17_a_sort_of_a_vector_has_a_plan(ranks: int) -> None:
    graph = function_graph(lambda a: a.argsort(), empty(1024, dtype=torch.int32))
    assert optimal(graph, alpa_mesh(ranks), mode="inference").collectives == ()


def test_a17_a_transposed_product_is_cut_without_communication() -> None:
    graph = function_graph(lambda a, b: -(a.T.reshape(64, 64) @ b), empty(64, 64), empty(64, 64))
    plan = optimal(graph, alpa_mesh(4), mode="inference")
    assert plan.stages[0].outputs[0].layout in {"S(0)", "S(1)"}
    assert plan.collectives == ()


def test_a18_a_cut_parameter_is_born_in_slices() -> None:
    """What a rank makes is the local shape; Adam's moments are made like the parameter."""
    plan = optimal(mlp(2, 16, 16), alpa_mesh(4), pins={"parameters": {"*.weight": "S(0)"}})
    weights = [p for p in plan.stages[0].parameters if p.target.endswith("weight")]
    assert {p.local_shape for p in weights} == {(4, 16)}
    assert plan.memory is not None
    held = plan.memory.parameters
    assert plan.memory.optimizer == 2 * held
    assert held < 2 * (16 * 16 + 16) * 4
