"""Limits of time, of cancellation and of the number of strategies while a problem is formulated."""

import time
from itertools import count
from typing import Any

import pytest

from autoshard import PlanOptions, SolveStatus, make_mesh, make_plan
from autoshard.base.limits import (
    LimitReached,
    Limits,
    count_entries,
    count_made,
    limited,
    seconds_left,
    unlimited,
)
from autoshard.errors import OptionError
from autoshard.graph import DType, Graph, Input, InputKind, Node, Output, Ref, Tensor
from autoshard.planner import problem_size
from autoshard.planner.formulation import formulating
from autoshard.planner.formulation.formulating import formulated, work_limits
from autoshard.solve import solve_problem

SIX_AXES = make_mesh((2,) * 6)


def chain(*shape: int, length: int = 3, dtype: DType = DType.BFLOAT16) -> Graph:
    """A program that multiplies its input with a parameter, again and again."""
    tensor = Tensor(shape, dtype, requires_grad=True)
    values = {"w": tensor, "x": Tensor(shape, dtype)}
    nodes = []
    for number in range(length):
        before = f"y{number - 1}" if number else "x"
        arguments = (("self", Ref(before)), ("other", Ref("w")))
        values[f"y{number}"] = tensor
        nodes.append(Node(f"y{number}", "aten.mul.Tensor", arguments, (f"y{number}",)))
    inputs = (Input("w", InputKind.PARAMETER, "w"), Input("x", InputKind.USER, "x"))
    return Graph(inputs, tuple(nodes), (Output(f"y{length - 1}"),), values)


MANY_DIMS = chain(*[2] * 25)


def test_limits_can_be_lifted() -> None:
    with limited(Limits(deadline=0.0)):
        with unlimited():
            count_made()
        with pytest.raises(LimitReached):
            count_made()


class Countdown:
    """A cancel token that is set when it was looked at so often."""

    def __init__(self, number: int) -> None:
        self._looks = count()
        self._number = number

    def is_set(self) -> bool:
        return next(self._looks) >= self._number


@pytest.fixture
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulating, "LEAST_SECONDS", 0.0)


@pytest.mark.usefixtures("_short_limits")
def test_the_time_limit_ends_the_listing_of_strategies() -> None:
    plan = make_plan(MANY_DIMS, SIX_AXES, time_limit=0.3)
    assert plan.certificate.status is SolveStatus.TIMED_OUT
    for words in (
        "time limit",
        "raise time_limit",
        "6 axes",
        "such as a mesh of 8x8",
        "64 devices",
    ):
        assert words in plan.reason
    assert not plan.found
    with pytest.raises(OptionError, match="raise time_limit"):
        problem_size(MANY_DIMS, SIX_AXES, PlanOptions(time_limit=0.3))


@pytest.mark.usefixtures("_short_limits")
def test_a_pipeline_ends_at_its_time_limit_too() -> None:
    plan = make_plan(MANY_DIMS, SIX_AXES, time_limit=0.5, stages=2, micro_batches=4)
    assert plan.certificate.status is SolveStatus.TIMED_OUT
    assert "raise time_limit" in plan.reason


@pytest.mark.matrix
@pytest.mark.parametrize("limit", [0.3, 2.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"stages": 2, "micro_batches": 4}, {"stages": "auto", "micro_batches": 4}],
    ids=["one stage", "two stages", "any number of stages"],
)
def test_a_time_limit_holds(options: dict[str, Any], limit: float) -> None:
    """Within 10 % and two seconds; the processor's time, since other processes may run too."""
    start = time.process_time()
    plan = make_plan(MANY_DIMS, SIX_AXES, time_limit=limit, **options)
    assert time.process_time() - start < 1.1 * limit + 2
    assert plan.certificate.status is SolveStatus.TIMED_OUT


def test_a_time_limit_holds_for_a_memory_budget() -> None:
    graph = chain(64, 64, 64, length=24)
    start = time.process_time()
    make_plan(graph, (2, 2, 2), time_limit=0.3, memory_budget=3 << 20)
    assert time.process_time() - start < 1.1 * 0.3 + 2


def test_a_solve_ends_at_the_deadline_around_it() -> None:
    formulation = formulated(chain(64, 64, 64), make_mesh((2, 2, 2)), PlanOptions(), Limits())
    with limited(Limits(deadline=time.perf_counter())):
        assert seconds_left() < 0
        found = solve_problem(formulation.problem, time_limit=60.0)
    assert found.reached_time_limit or found.status is SolveStatus.OPTIMAL
    assert found.wall_time < 1.0


@pytest.mark.parametrize("stages", [1, 2])
def test_a_request_can_be_cancelled_while_strategies_are_listed(stages: int) -> None:
    options = PlanOptions(stages=stages, micro_batches=4)
    plan = make_plan(MANY_DIMS, SIX_AXES, options, cancel=Countdown(1000))
    assert plan.certificate.status is SolveStatus.CANCELLED
    assert "cancelled" in plan.reason


@pytest.mark.parametrize("looks", [0, 100, 1000, 3000])
def test_a_search_that_is_cancelled_anywhere_has_an_outcome(looks: int) -> None:
    graph = chain(64, 64, length=4)
    free = make_plan(graph, (2, 2))
    assert free.memory is not None
    tight = int(0.8 * free.memory.peak)
    plan = make_plan(graph, (2, 2), memory_budget=tight, cancel=Countdown(looks))
    stopped = {SolveStatus.CANCELLED, SolveStatus.INFEASIBLE}
    assert plan.found or plan.certificate.status in stopped


def test_strategies_are_counted_while_they_are_listed() -> None:
    limits = Limits(most=1000)
    with pytest.raises(OptionError, match=r"more than 1,000 strategies.* 8x8"):
        formulated(MANY_DIMS, SIX_AXES, PlanOptions(), limits)
    assert limits.made == 1001


def test_a_table_that_no_memory_holds_is_not_made() -> None:
    with limited(Limits()), pytest.raises(LimitReached):
        count_entries(10**12)


def test_limits_around_others_hold_too() -> None:
    with limited(Limits(cancel=Countdown(2))), limited(work_limits(60.0)):
        count_made()
        count_made()
        with pytest.raises(LimitReached) as reached:
            count_made()
    assert reached.value.status is SolveStatus.CANCELLED
    count_made()  # without limits


def test_a_large_program_that_no_devices_can_hold_is_refused_by_arithmetic() -> None:
    graph = chain(1 << 20, 1 << 10, length=600)
    plan = make_plan(graph, 8, memory_budget=10**9)
    assert plan.certificate.status is SolveStatus.INFEASIBLE
    # A bfloat16 parameter, its gradient, two values of AdamW and the input: 10 bytes per element.
    assert f"at least {10 * (1 << 30) // 8:,} bytes" in plan.reason
    assert "use at least 11 devices" in plan.reason
    assert plan.conflict is not None
    assert plan.conflict.budget == 10**9
    assert not plan.provenance.statistics
    pipeline = make_plan(graph, 8, memory_budget=10**9, stages=2, micro_batches=4)
    assert pipeline.reason == plan.reason


def test_programs_with_more_bytes_than_can_be_summed_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes together"):
        make_plan(chain(1 << 27, 1 << 27, length=60), 8)
