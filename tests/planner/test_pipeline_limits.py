"""What bounds the work of making a pipeline, and what is reported on the way."""

from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from support.models import graph_of, llama, meta

from autoshard.base.outcome import SolveStatus
from autoshard.checker import check_plan
from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan, plan_id, problem_size
from autoshard.planner.budget.rounds import Outcome
from autoshard.planner.budget.search import BudgetSearch
from autoshard.planner.pipeline.equal_stages import EqualStages, StagePlan
from autoshard.planner.pipeline.quick_plans import QuickPlanner
from autoshard.solve import Progress

OPTIONS = PlanOptions(stages=2, schedule="1F1B", micro_batches=4)
MESH = make_mesh((2, 2))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(llama, layers=2))


class Store:
    """A block cache that counts what is written."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.kept.get(key)

    def put(self, key: str, body: bytes) -> None:
        self.kept[key] = body


@pytest.mark.parametrize("phase", ["1F1B with 2 stages on 2", "stage 0 of 2", "stage 1 of 2"])
def test_a_pipeline_is_cancelled_at_any_time(graph: Graph, phase: str) -> None:
    cancel, phases = Event(), list[str]()

    def report(progress: Progress) -> None:
        phases.append(progress.phase)
        if progress.phase.startswith(phase):
            cancel.set()

    plan = make_plan(graph, MESH, OPTIONS, on_progress=report, cancel=cancel)
    assert plan.certificate.status is SolveStatus.CANCELLED
    assert not plan.found
    assert "cancelled" in plan.reason
    assert phases[-1].startswith(phase)


def test_a_request_that_is_cancelled_before_it_begins_solves_nothing(graph: Graph) -> None:
    cancel, store = Event(), Store()
    cancel.set()
    plan = make_plan(graph, MESH, OPTIONS, cancel=cancel, block_cache=store)
    assert plan.certificate.status is SolveStatus.CANCELLED
    assert not store.kept


def test_a_time_limit_ends_the_search(graph: Graph) -> None:
    plan = make_plan(graph, MESH, OPTIONS.with_values(time_limit=1e-6))
    assert plan.certificate.status is SolveStatus.TIMED_OUT
    assert "raise time_limit" in plan.reason


def test_one_stage_of_a_small_program_is_found_within_any_time_limit(graph: Graph) -> None:
    """In the seconds that a request may take beyond it."""
    options = PlanOptions(stages="auto", micro_batches=4, time_limit=1e-6)
    plan = make_plan(graph, MESH, options)
    assert len(plan.stages) == 1
    assert check_plan(plan, graph) == ()
    assert plan.id == plan_id(graph, MESH, options)
    assert "that fit 80 GB per device" in plan.certificate.statement


def test_progress_names_schedules_and_stages(graph: Graph) -> None:
    found: list[Progress] = []
    plan = make_plan(graph, MESH, OPTIONS, on_progress=found.append)
    assert plan.found
    phases = dict.fromkeys(progress.phase.split(":")[0] for progress in found)
    assert [*phases] == [
        "1F1B with 2 stages on 2 pipeline ranks",
        "stage 0 of 2",
        "stage 1 of 2",
    ]
    assert plan.certificate.objective is not None
    assert found[-1].incumbent == pytest.approx(plan.certificate.objective, rel=0.5)


def test_problems_of_sub_meshes_are_bounded(graph: Graph) -> None:
    with pytest.raises(OptionError, match="strategies, but at most 10 are allowed"):
        make_plan(graph, MESH, OPTIONS, max_strategies=10)


def test_a_step_that_is_too_long_to_simulate_is_refused(graph: Graph) -> None:
    options = PlanOptions(stages=20, micro_batches=65_536)
    with pytest.raises(OptionError, match="20 stages with 65,536 micro-batches run 1,310,720"):
        make_plan(graph, make_mesh((20,)), options)


def test_the_schedule_says_what_is_in_flight(graph: Graph) -> None:
    with pytest.raises(OptionError, match="in_flight is 2, but the schedule of a pipeline"):
        make_plan(graph, MESH, OPTIONS.with_values(in_flight=2))


def test_stages_without_a_plan_in_time_are_not_infeasible(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may find a plan, so the answer must not be kept as final."""

    def time_is_over(self: BudgetSearch, memory_budget: int, **options: Any) -> Outcome:
        found = original(self, memory_budget, **options)
        solution = replace(found.solution, status=SolveStatus.TIMED_OUT, choice=None)
        return replace(found, plan=None, solution=solution)

    original = BudgetSearch.run
    monkeypatch.setattr(BudgetSearch, "run", time_is_over)
    monkeypatch.setattr(QuickPlanner, "plan", lambda *_: None)
    plan = make_plan(graph, MESH, OPTIONS)
    assert plan.certificate.status is SolveStatus.TIMED_OUT
    assert plan.reason.startswith("stage 0 of 2: the time limit ended")


def test_collectives_are_forbidden_on_axes_that_stages_have(graph: Graph) -> None:
    """An axis that is divided among the stages has no collectives."""
    forbidden = [{"kind": "all_reduce", "axis": "axis0"}, {"kind": "all_to_all", "axis": "axis1"}]
    options = PlanOptions(**OPTIONS.given | {"forbid": forbidden})
    plan = make_plan(graph, MESH, options)
    assert check_plan(plan, graph) == ()
    assert problem_size(graph, MESH, options).num_strategies > 0
    wrong = PlanOptions(**OPTIONS.given | {"forbid": [{"kind": "all_reduce", "axis": "nobody"}]})
    with pytest.raises(OptionError, match="forbid names axis 'nobody'"):
        make_plan(graph, MESH, wrong)


def test_stages_share_the_time_limit(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    plan = EqualStages.plan

    def noted(self: EqualStages, program: Graph, mesh: Mesh, options: PlanOptions) -> StagePlan:
        given.append(options.solver.time_limit)
        return plan(self, program, mesh, options)

    monkeypatch.setattr(EqualStages, "plan", noted)
    assert make_plan(graph, MESH, OPTIONS.with_values(time_limit=60.0)).found
    assert len(given) == 2
    assert given[0] <= 30.0
    assert given[1] <= 60.0
