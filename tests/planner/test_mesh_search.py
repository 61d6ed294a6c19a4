"""Searches over all meshes of a number of devices, in several processes."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from errno import ENOSPC
from functools import partial
from math import prod
from threading import Event
from types import FrameType
from typing import Any

import pytest
from support.meshes import slow_devices
from support.models import Planner, llama, mlp, residuals, small_graph

from autoshard.base.outcome import SolveStatus
from autoshard.checker import check_plan
from autoshard.errors import MeshError, OptionError
from autoshard.mesh import Link, Topology, get_topology, make_mesh
from autoshard.plan import Pins, PlanOptions
from autoshard.planner import (
    SearchProgress,
    candidate_meshes,
    make_plan,
    plan_id,
    search_bound,
    search_meshes,
    search_statement,
)
from autoshard.planner.meshes.worker import plans_one_stage
from autoshard_solver_cache import NamespacedCache, SolverCache

FLAT: Topology = slow_devices(a=2).topology
NODES_OF_4 = Topology(
    "nodes of 4", FLAT.device, (Link("fast", 4, 1e9, 1e-6), Link("slow", None, 1e8, 1e-5))
)


def shapes(num_devices: int, **options: object) -> list[tuple[int, ...]]:
    return [mesh.axis_sizes for mesh in candidate_meshes(num_devices, **options)]


def test_every_factorisation_is_a_candidate() -> None:
    assert shapes(16) == [(16,), (2, 8), (4, 4), (8, 2), (2, 2, 4), (4, 2, 2)]
    assert shapes(1) == [(1,)]
    assert shapes(7) == [(7,)]
    assert shapes(8, max_axes=1) == [(8,)]
    assert all(prod(shape) == 360 for shape in shapes(360, max_axes=6))


def test_orders_that_lie_alike_over_the_links_are_one() -> None:
    # Inside one node, or where all links are alike, the order of axes changes nothing.
    assert shapes(8, topology="h100-sxm") == [(8,), (2, 4), (2, 2, 2)]
    assert shapes(64, topology=FLAT, max_axes=2) == [(64,), (2, 32), (4, 16), (8, 8)]
    # Between nodes it matters which axis crosses.
    assert {(2, 8), (8, 2)} <= set(shapes(16, topology="h100-sxm"))


def named(num_devices: int, **options: object) -> list[dict[str, int]]:
    found = candidate_meshes(num_devices, topology=FLAT, max_axes=2, options=PlanOptions(**options))
    return [{axis.name: axis.size for axis in mesh.axes} for mesh in found]


def test_the_outermost_axis_may_be_for_a_pipeline() -> None:
    with_pipelines = [
        {"axis0": 8},
        {"pp": 8},
        {"axis0": 2, "axis1": 4},
        {"pp": 2, "axis1": 4},
        {"pp": 4, "axis1": 2},
    ]
    assert named(8, stages="auto") == with_pipelines
    assert named(8) == named(8, stages=1) == [m for m in with_pipelines if "pp" not in m]
    only = [m for m in with_pipelines if "pp" in m]
    assert named(8, stages=8) == named(8, cuts=("before:a",)) == only
    assert named(8, stages=4) == named(8, balance=(1, 1, 1, 1)) == only[1:]
    assert len(candidate_meshes(8, most=2, options=PlanOptions(stages="auto"))) == 2


def test_a_search_goes_over_pipeline_ranks() -> None:
    graph = small_graph(partial(residuals, layers=4))
    options = PlanOptions(stages="auto", micro_batches=4)
    found = search_meshes(graph, 4, topology=FLAT, options=options, max_axes=2)
    assert [c.objective for c in found] == sorted(c.objective for c in found)
    assert len(found) == 4
    for candidate in found:
        plan = candidate.plan
        assert plan is not None
        assert check_plan(plan, graph) == ()
        assert plan.id == plan_id(graph, candidate.mesh, candidate.options)
        if candidate.mesh.axis_names[0] == "pp":
            assert plan.pipeline is not None
            assert len(plan.pipeline.ranks) == candidate.mesh.axis_sizes[0]
            assert 0 < candidate.bound < candidate.objective
            assert candidate.options == options
        else:
            assert plan.pipeline is None
            assert candidate.options.pipeline.stages == 1
    alone = make_plan(graph, found[0].mesh, found[0].options)
    assert alone.certificate.objective == pytest.approx(found[0].objective)


def test_stages_that_pipeline_ranks_do_not_divide_are_refused() -> None:
    mesh = make_mesh((2, 2), axes=("pp", "tp"))
    with pytest.raises(OptionError, match="3 stages cannot be divided among the 2 pipeline ranks"):
        make_plan(small_graph(mlp), mesh, PlanOptions(stages=3, micro_batches=2))


def test_orders_that_are_one_have_one_price(planned: Planner) -> None:
    graph = small_graph(mlp)
    first, second = (planned(graph, slow_devices(a=a, b=b)) for a, b in ((2, 4), (4, 2)))
    assert first.costs.total == pytest.approx(second.costs.total)


def test_a_search_ranks_the_plans_of_all_meshes(planned: Planner) -> None:
    graph = small_graph(mlp)
    seen: list[SearchProgress] = []
    found = search_meshes(graph, 8, topology=FLAT, on_progress=seen.append)
    assert [p.done for p in seen] == [1, 2, 3]
    assert {p.total for p in seen} == {3}
    objectives = [candidate.objective for candidate in found]
    assert objectives == sorted(objectives)
    assert [len(candidate.mesh.axes) for candidate in found if candidate.plan is None] in ([], [3])
    for candidate in found:
        alone = planned(graph, candidate.mesh)
        if candidate.plan is None:
            assert alone.certificate.objective is not None
            assert alone.certificate.objective > found[0].objective
            continue
        assert check_plan(candidate.plan, graph) == ()
        assert candidate.plan.id == alone.id
        assert candidate.plan.stages == alone.stages


def test_a_mesh_of_three_axes_that_is_slower_has_a_bound_and_no_plan(planned: Planner) -> None:
    graph = small_graph(mlp)
    best = min(
        planned(graph, make_mesh(shape, topology=FLAT)).certificate.objective or 0.0
        for shape in ((8,), (2, 4))
    )
    (candidate,) = (c for c in search_meshes(graph, 8, topology=FLAT) if len(c.mesh.axes) == 3)
    seconds = planned(graph, candidate.mesh).certificate.objective
    assert seconds is not None
    is_slower = seconds > best * (1 + 1e-9)
    assert (candidate.plan is None) == is_slower
    assert ("every plan takes at least" in candidate.error) == is_slower


@pytest.mark.parametrize("budget", [None, 20_000])
def test_the_best_mesh_is_found_whatever_the_number_of_processes(budget: int | None) -> None:
    graph = small_graph(mlp)
    options = PlanOptions(memory_budget=budget)
    found = [
        search_meshes(graph, 32, topology=NODES_OF_4, options=options, num_workers=number)
        for number in (1, 2)
    ]
    texts = [[(c.mesh.axis_sizes, c.objective, c.error) for c in one] for one in found]
    assert texts[0] == texts[1]
    excluded = [c for c in found[0] if "every plan takes at least" in c.error]
    assert excluded
    least = (1 - options.solver.relative_gap) * found[0][0].objective
    for candidate in excluded:
        alone = make_plan(graph, candidate.mesh, options)
        assert alone.certificate.objective is None or alone.certificate.objective > least


LARGER = [
    pytest.param(build, devices, share, marks=pytest.mark.long)
    for build in (mlp, partial(residuals, layers=4), partial(llama, layers=4))
    for devices, share in ((4, None), (8, None), (4, 0.85), (8, 0.85))
]


@pytest.mark.parametrize(
    ("build", "devices", "share"), [(partial(llama, layers=2), 4, 0.85), *LARGER]
)
def test_a_search_finds_what_planning_every_mesh_finds(
    build: Callable[[], Any], devices: int, share: float | None
) -> None:
    graph = small_graph(build)
    meshes = candidate_meshes(devices, topology=NODES_OF_4)
    budget = None
    if share is not None:
        budget = round(share * max(make_plan(graph, mesh).memory.peak for mesh in meshes))
    options = PlanOptions(memory_budget=budget)
    seen: list[SearchProgress] = []
    found = search_meshes(
        graph, devices, topology=NODES_OF_4, options=options, on_progress=seen.append
    )
    alone = {mesh: make_plan(graph, mesh, options).certificate for mesh in meshes}
    seconds = [c.objective for c in alone.values() if c.objective is not None]
    if not seconds:
        assert all(candidate.plan is None or not candidate.plan.found for candidate in found)
        return
    # A plan of one mesh alone may end within the gap of its bound, or at the time limit.
    assert found[0].objective is not None
    assert found[0].objective <= min(seconds) * (1 + options.solver.relative_gap)
    assert found[0].objective >= min(c.bound for c in alone.values() if c.bound is not None)
    assert {candidate.mesh for candidate in found} == set(meshes)
    for candidate in found:
        own = alone[candidate.mesh].objective
        if candidate.plan is not None and own is not None:
            assert candidate.objective <= own * (1 + 1e-9)
    assert seen[-1].best == found[0].objective
    assert seen[-1].bound <= min(seconds) * (1 + 1e-9)
    assert len(seen) >= len(meshes)


def test_a_search_that_is_stopped_has_the_first_plans() -> None:
    graph = small_graph(partial(residuals, layers=4))
    free = make_plan(graph, make_mesh((4,), topology=FLAT))
    options = PlanOptions(memory_budget=round(0.9 * free.memory.peak))
    stop = Event()

    def report(progress: SearchProgress) -> None:
        if len(progress.latest.mesh.axes) == 2:
            stop.set()

    found = search_meshes(
        graph, 4, topology=FLAT, options=options, on_progress=report, cancel=stop, num_workers=1
    )
    assert len(found) == 2
    statuses = []
    for candidate in found:
        assert candidate.plan is not None
        assert check_plan(candidate.plan, graph) == ()
        assert candidate.plan.certificate.bound is not None
        statuses.append(candidate.plan.certificate.status)
    assert SolveStatus.CANCELLED in statuses


def test_a_search_that_is_out_of_time_has_what_is_known() -> None:
    graph = small_graph(partial(residuals, layers=4))
    found = search_meshes(graph, 4, topology=FLAT, total_time_limit=1e-3, num_workers=1)
    assert all(candidate.was_stopped and candidate.plan is None for candidate in found)
    assert "out of time, before it was finished" in search_statement(found)


def test_meshes_are_planned_in_the_order_of_their_innermost_axis() -> None:
    order: list[tuple[int, ...]] = []
    search_meshes(
        small_graph(mlp),
        16,
        topology=NODES_OF_4,
        num_workers=1,
        on_progress=lambda progress: order.append(progress.latest.mesh.axis_sizes),
    )
    first = [(16,), (2, 8), (4, 4), (8, 2)]
    assert order == [*first, (2, 2, 4), (2, 4, 2), (4, 2, 2)]


def test_a_bound_is_of_plans_of_one_stage() -> None:
    graph = small_graph(mlp)
    pipelined = make_mesh((2, 2, 2), axes=("pp", "dp", "tp"))
    assert not plans_one_stage(graph, pipelined, PlanOptions(stages="auto", micro_batches=2))
    assert not plans_one_stage(graph, make_mesh((2, 2, 2)), PlanOptions(stages=2, micro_batches=2))
    assert plans_one_stage(graph, make_mesh((2, 2, 2)), PlanOptions())


@pytest.mark.thorough
def test_a_search_keeps_and_reuses_solved_blocks() -> None:
    graph = small_graph(partial(residuals, layers=4))
    block_cache = NamespacedCache(SolverCache("sqlite://"), "blocks")
    fresh, first, second = (
        search_meshes(graph, 4, block_cache=store) for store in (None, block_cache, block_cache)
    )
    plans = [[candidate.plan for candidate in found] for found in (fresh, first, second)]
    for alone, kept, reused in zip(*plans, strict=True):
        assert alone is not None
        assert kept is not None
        assert reused is not None
        assert alone.stages == kept.stages == reused.stages
        blocks = reused.provenance.blocks
        assert sum(block.num_solved for block in kept.provenance.blocks) > 0
        assert sum(block.num_reused for block in blocks) > 0
        assert sum(block.num_solved for block in blocks) == 0


class FullDisk:
    """A store that can keep nothing more, or that cannot even be read."""

    def __init__(self, *, is_readable: bool) -> None:
        self.is_readable = is_readable
        self.failures = 0

    def get(self, key: str) -> bytes | None:  # noqa: ARG002  the protocol's signature
        if not self.is_readable:
            self._fail()
        return None

    def put(self, key: str, body: bytes) -> None:  # noqa: ARG002  as above
        self._fail()

    def _fail(self) -> None:
        self.failures += 1
        raise OSError(ENOSPC, "no space left on device")


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_store_in_trouble_is_left_alone(is_readable: bool) -> None:
    graph = small_graph(partial(llama, layers=4))
    store = FullDisk(is_readable=is_readable)
    found = search_meshes(graph, 2, block_cache=store, num_workers=1)
    assert store.failures == 1
    assert [candidate.error for candidate in found] == [""]
    assert found[0].plan is not None
    assert found[0].plan.found


def test_meshes_that_the_options_do_not_fit_come_last() -> None:
    pins = Pins(parameters={"up.weight": "S(0),*"})
    options = PlanOptions(pins=pins, mode="inference")
    found = search_meshes(small_graph(mlp), 4, options=options, num_workers=1)
    assert [candidate.mesh.axis_sizes for candidate in found] == [(2, 2), (4,)]
    assert found[0].plan is not None
    assert found[1].plan is None
    assert "one part per axis" in found[1].error


def test_options_that_fit_no_mesh_are_refused() -> None:
    options = PlanOptions(pins=Pins(parameters={"sideways.*": "*"}))
    with pytest.raises(OptionError, match=r"no mesh of 2 devices.*no such name"):
        search_meshes(small_graph(mlp), 2, options=options)


def test_a_search_stops_when_it_is_told_to() -> None:
    stop = Event()
    found = search_meshes(
        small_graph(mlp),
        64,
        topology=FLAT,
        num_workers=1,
        max_axes=2,
        on_progress=lambda _: stop.set(),
        cancel=stop,
    )
    planned, *others = found
    assert planned.plan is not None
    assert not planned.was_stopped
    assert all(c.plan is None and c.was_stopped and "stopped before" in c.error for c in others)
    assert {c.mesh for c in found} == set(candidate_meshes(64, topology=FLAT, max_axes=2))
    assert search_bound(found) == float("-inf")
    statement = search_statement(found)
    assert statement.startswith("No plan on 1 of these 4 meshes")
    assert "before it was finished" in statement


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_devices": 0}, "num_devices is 0"),
        ({"num_devices": 8, "max_axes": 0}, "max_axes is 0"),
        ({"num_devices": 8, "max_axes": 9}, "max_axes is 9"),
        ({"num_devices": 8, "num_workers": 0}, "num_workers is 0"),
    ],
)
def test_numbers_out_of_range_are_named(arguments: dict[str, int], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        search_meshes(small_graph(mlp), **arguments)


def test_a_topology_must_hold_the_devices() -> None:
    with pytest.raises(MeshError, match="abacus"):
        candidate_meshes(8, topology="abacus")
    small = replace(get_topology("h100-sxm"), levels=get_topology("h100-sxm").levels[:1])
    with pytest.raises(MeshError, match=r"has 16 devices, but topology .* has 8"):
        candidate_meshes(16, topology=small)


def num_calls(work: Callable[[], object]) -> int:
    """Number of Python functions that some work calls."""
    events = Counter[str]()

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        events[event] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return events["call"]


def test_candidates_are_looked_for_only_as_far_as_needed() -> None:
    for num_devices, max_axes in ((5040, 6), (720720, 3), (1 << 20, 6)):
        found = shapes(num_devices, max_axes=max_axes, most=65)
        assert len(set(found)) == 65
        assert all(prod(shape) == num_devices for shape in found)
        assert [len(shape) for shape in found] == sorted(len(shape) for shape in found)
        # There are thousands of candidates in all.
        calls = num_calls(partial(candidate_meshes, num_devices, max_axes=max_axes, most=65))
        one = num_calls(partial(make_mesh, found[-1]))
        assert calls < 4 * 65 * one
    assert shapes(16, most=4) == shapes(16)[:4]
