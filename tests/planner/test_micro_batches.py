"""The number of micro-batches of a step: estimates against plans of every number."""

from math import inf

import pytest
import torch
from torch import nn

from autoshard.errors import OptionError
from autoshard.graph import Graph, export_model, load_graph, resized, with_dynamic_batch
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import PlanOptions
from autoshard.planner import activations_fit, estimate_micro_batches, make_plan
from autoshard.planner.pipeline.micro_batches import _try_numbers

BATCH, WIDTH = 256, 256
TOPOLOGY = "h100-sxm"


def program(size: int) -> Graph:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    return load_graph(export_model(model, (torch.zeros(size, 16, WIDTH, device="meta"),)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return with_dynamic_batch(program(BATCH), program(BATCH // 2))


def seconds(graph: Graph, mesh: Mesh, number: int, budget: int) -> float:
    part = resized(graph, {"batch": BATCH // number})
    made = make_plan(part, mesh, micro_batches=number, memory_budget=budget, time_limit=2.0)
    return made.costs.total if made.costs is not None else inf


@pytest.mark.parametrize("budget", [4_000_000, 16_000_000])
def test_the_estimated_number_is_nearly_the_fastest(graph: Graph, budget: int) -> None:
    options = PlanOptions(memory_budget=budget)
    found = estimate_micro_batches(graph, 4, options, topology=TOPOLOGY)
    mesh = make_mesh((2, 2), topology=TOPOLOGY)
    times = {
        number: seconds(graph, mesh, number, budget) for number in {1, 4, 16, 64, found.number}
    }
    assert times[found.number] <= 1.05 * min(times.values())
    assert found.seconds[found.number] == min(found.seconds.values())
    assert found.options.training.micro_batches == found.number
    assert found.graph.values[found.graph.inputs[-1].name].shape[0] == BATCH // found.number


def test_a_batch_that_never_fits_is_an_error(graph: Graph) -> None:
    with pytest.raises(OptionError, match="no number of micro-batches of a batch of 256"):
        estimate_micro_batches(graph, 4, PlanOptions(memory_budget=200_000), topology=TOPOLOGY)


def test_activations_are_those_of_all_micro_batches(graph: Graph) -> None:
    topology, part = make_mesh((4,), topology=TOPOLOGY).topology, program(BATCH // 4)
    values = sum(v.nbytes for v in graph.values.values())
    for share, fits in ((0.2, False), (2.0, True)):
        options = PlanOptions(memory_budget=int(share * values / 4))
        for number, one in ((1, program(BATCH)), (4, part)):
            assert activations_fit(one, number, 4, topology, options) is fits


@pytest.mark.parametrize(
    ("times", "start", "tried"),
    [
        ([3.0, 2.0, 1.0, 2.0], 3, [3, 2, 1]),
        ([1.0, 2.0, 3.0], 2, [2, 1, 0]),
        ([inf, 3.0, 2.0, 4.0], 1, [1, 0, 2, 3]),
        ([inf, inf, inf, 2.0, 3.0], 0, [0, 1, 2, 3, 4]),
        ([inf], 0, [0]),
    ],
)
def test_numbers_are_tried_as_long_as_they_are_faster(
    times: list[float], start: int, tried: list[int]
) -> None:
    asked: list[int] = []

    def seconds_of(number: int) -> float:
        asked.append(number)
        return times[number]

    _try_numbers(list(range(len(times))), start, seconds_of)
    assert asked == tried


def test_a_state_that_is_too_large_is_named(graph: Graph) -> None:
    with pytest.raises(OptionError, match=r"parameters .*, so with 4 devices .* use at least"):
        estimate_micro_batches(graph, 4, PlanOptions(memory_budget=100_000), topology=TOPOLOGY)
