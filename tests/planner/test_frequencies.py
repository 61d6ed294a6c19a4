"""Frequencies within a memory budget, compared with all that there are."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scenarios.architectures import mlp as chain
from support.meshes import slow_devices

from autoshard.base.arrays import IntArray
from autoshard.checker import check_plan
from autoshard.costs import GATHERED_ONCE, Frequency
from autoshard.mesh import Mesh
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.frequencies import Frequencies, most_savings
from autoshard.solve import solve_problem

GRAPH = chain(layers=4, batch=1024, width=64)
OPTIONS = PlanOptions(
    micro_batches=4, pins={"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}}, time_limit=10
)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    mesh = slow_devices(a=4)
    device = replace(mesh.topology.device, memory_bandwidth=1e15)
    return replace(mesh, topology=replace(mesh.topology, device=device))


@pytest.fixture(scope="module")
def formulation(mesh: Mesh) -> Formulation:
    return Formulation.of(GRAPH, mesh, OPTIONS)


@pytest.fixture(scope="module")
def choice(formulation: Formulation) -> IntArray:
    found = solve_problem(formulation.problem).choice
    assert found is not None
    return found


def options_of(
    formulation: Formulation, choice: IntArray
) -> Iterator[tuple[int, list[tuple[Frequency, float, float]]]]:
    """The frequencies of each use of a parameter, with their seconds and kept bytes."""
    for number, use in enumerate(formulation.uses):
        if not formulation.reads_parameter(use):
            continue
        costs = formulation.edge_costs(use)
        ends = int(choice[use.source]), int(choice[use.target])
        pair = costs.rows[ends[0]], costs.cols[ends[1]]
        shard, full = costs.source_bytes[pair[0]], costs.target_bytes[pair[1]]
        kept = {Frequency.GATHER_STEP: full, Frequency.STEP: 2 * full - shard}
        yield (
            number,
            [
                (kind, float(costs.seconds_of(kind)[pair]), float(kept.get(kind, 0)))
                for kind in costs.frequencies(*ends)
            ],
        )


def test_savings_are_at_most_one_short_of_the_best(
    formulation: Formulation, choice: IntArray
) -> None:
    options = dict(options_of(formulation, choice))
    every = [
        (sum(s for _, s, _ in picked), sum(b for _, _, b in picked))
        for picked in product(*options.values())
    ]
    largest = max(s for found in options.values() for _, s, _ in found)
    assert len(every) > 3**4
    for limit in np.linspace(0, max(nbytes for _, nbytes in every), 9):
        best = min(seconds for seconds, nbytes in every if nbytes <= limit)
        found = most_savings(formulation, choice, lambda x, at=limit: kept(options, x)[1] <= at)
        assert found is not None
        assert best <= kept(options, found)[0] <= best + largest
    assert most_savings(formulation, choice, lambda _: False) is None


def kept(
    options: dict[int, list[tuple[Frequency, float, float]]], frequencies: Frequencies
) -> tuple[float, float]:
    """Seconds and kept bytes of all uses with some frequencies."""
    chosen = [
        next((s, b) for kind, s, b in options[number] if kind is frequency)
        for number, frequency in frequencies.items()
    ]
    return sum(s for s, _ in chosen), sum(b for _, b in chosen)


def test_with_less_memory_more_runs_in_every_micro_batch(mesh: Mesh) -> None:
    free = make_plan(GRAPH, mesh, OPTIONS)
    assert free.memory is not None
    counts, kinds = [], set()
    for share in (1.0, 0.95, 0.9):
        budget = int(share * free.memory.peak)
        plan = make_plan(GRAPH, mesh, OPTIONS.with_values(memory_budget=budget))
        assert check_plan(plan) == ()
        counts.append(sum(c.count for c in plan.collectives))
        (stage,) = plan.stages
        kinds |= {resharding.frequency for resharding in stage.reshardings}
    assert counts[0] < counts[1] <= counts[2]
    assert kinds > GATHERED_ONCE or kinds >= {Frequency.STEP, Frequency.MICRO_BATCH}
