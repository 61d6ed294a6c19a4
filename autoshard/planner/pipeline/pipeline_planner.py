"""`make_plan`: makes a plan of one stage, or of a pipeline of stages."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf, log2
from typing import Any, NamedTuple

from autoshard.base.arguments import Count, check_arguments
from autoshard.base.limits import LimitReached, Limits, limited
from autoshard.base.outcome import SolveStatus
from autoshard.errors import OptionError
from autoshard.graph import Graph, GraphLike, StageCutter, to_graph
from autoshard.mesh import Mesh, MeshLike, to_mesh
from autoshard.plan.certificate import with_statement
from autoshard.plan.document import GraphSummary, Plan
from autoshard.plan.options import PlanOptions, to_options
from autoshard.plan.options.of_stages import on_sub_mesh, stage_options, with_pinned_ends
from autoshard.plan.sub_meshes import num_pipeline_ranks, sub_mesh
from autoshard.planner.baselines import ComparisonLimits, OneStage, with_comparisons
from autoshard.planner.export_roles import chooses_export_roles, fastest_export
from autoshard.planner.formulation.formulating import (
    check_checkpointing,
    check_runs,
    check_trainable,
)
from autoshard.planner.memory.least_memory import LeastMemory
from autoshard.planner.pipeline.bounds import GIVEN_CUTS, ProvenBound, all_cuts, mean_work
from autoshard.planner.pipeline.equal_stages import LEAST_TIME_LIMIT, EqualStages
from autoshard.planner.pipeline.limits import SearchLimits, Stopped
from autoshard.planner.pipeline.policies import (
    cuts_of,
    num_stages,
    required_cuts,
    stage_cutter,
)
from autoshard.planner.pipeline.quick_plans import QuickPlanner
from autoshard.planner.pipeline.range_costs import whole_bound
from autoshard.planner.pipeline.request_size import largest_sub_mesh
from autoshard.planner.pipeline.search import MAX_ACTIONS, PipelineCandidate, PipelineSearch
from autoshard.planner.pipeline.stage_plans import (
    DocumentBuilder,
    PlannedStage,
    with_stored_layouts,
)
from autoshard.planner.planner import (
    make_stage_plan,
    plan_id,
    plan_without_stages,
    without_memory,
)
from autoshard.pricing.performance import plan_performance
from autoshard.pricing.throughput import program_work
from autoshard.schedules.schedule import schedule_error
from autoshard.solve import CancelToken, KeyValueStore, Progress

_USUAL_RANKS = 8
"""A number of pipeline ranks that is often best; those that are close to it are tried first."""
_LEAST_SHARE = 0.5
"""Least time limit of a stage, seconds."""
_MAX_ROUNDS = 4
"""Maximum number of pipelines whose stages are planned, if stages do not fit into memory."""
_LATEST_SHARE = 1.08
_LATEST_SECONDS = 1.6
"""A request ends at this share of its time limit plus these seconds, as far as it got."""
_WHY_NONE = (
    "no pipeline was found: by the estimates of the search, none of the numbers of stages and "
    "schedules that the options allow fits the mesh, the micro-batches and the memory; allow more "
    "stages, other schedules or more memory, or ask for stages=1, which also ignores calls of "
    "pipe_split() in forward"
)
_WHY_STOPPED = {
    SolveStatus.CANCELLED: "planning was cancelled before a pipeline was found",
    SolveStatus.TIMED_OUT: "the time limit ended before a pipeline was found; raise time_limit",
}


@check_arguments
def make_plan(
    graph: GraphLike,
    mesh: MeshLike,
    options: PlanOptions | None = None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
    max_strategies: Count | None = None,
    **single_options: Any,
) -> Plan:
    """Find the fastest way to run a graph on a mesh, as one stage or as a pipeline.

    Args:
        graph: the program, from `load_graph`, or what it reads: the path or bytes of an archive;
            or an `ExportedProgram`. Of a pipeline, that of a micro-batch.
        mesh: the devices and the links between them, a `DeviceMesh`, or the size of each axis:
            `(2, 4)`, `"dp=2,tp=4"`, `8`. Pipeline stages cut the outermost axes; if the outermost
            one is named `pp`, its size is the number of pipeline ranks.
        options: mode, optimizer, memory budget, pipeline stages, limits of the solver.
        **single_options: single members of `PlanOptions`, which replace those of `options`.
        on_progress: called with phase, incumbent and bound while the solver runs.
        cancel: an event; setting it stops the solver.
        block_cache: a store of solved blocks, read and written. Only the time of planning and
            `provenance.blocks` depend on it.
        max_strategies: maximum total number of strategies of all variables.

    Returns:
        A plan with its certificate. If none was found, a document without stages, whose
        status and reason explain that.

    Raises:
        GraphError: the graph cannot be planned in this mode, or cannot be cut so often.
        MeshError: the mesh is invalid.
        OptionError: an option is invalid, or the problem has more than `max_strategies`.
        ArgumentTypeError: an argument has the wrong type; the message says what to pass.

    Example:
        >>> plan = make_plan("gpt2.pt2", "dp=2,tp=4", memory_budget="70GB")

        Four pipeline stages on a mesh of 4 x 8, each on 8 devices:

        >>> plan = make_plan(graph, make_mesh((4, 8)), PlanOptions(stages=4, micro_batches=16))
    """
    program, devices = to_graph(graph), to_mesh(mesh)
    asked = to_options(options, single_options)
    limits = ComparisonLimits(on_progress, cancel, block_cache, max_strategies)
    plan = _with_performance(_plan(program, devices, asked, limits), program)
    return compare_plan(
        plan,
        program,
        asked,
        on_progress=on_progress,
        cancel=cancel,
        block_cache=block_cache,
        max_strategies=max_strategies,
    )


def compare_plan(
    plan: Plan,
    graph: Graph,
    options: PlanOptions,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
    max_strategies: int | None = None,
    one_stage: OneStage | None = None,
) -> Plan:
    """A plan with the comparisons that its options ask for, if it was found.

    Args:
        plan: the plan, made without comparisons.
        graph: its program.
        options: those of the plan, with `comparisons` or without.
        on_progress: as for `make_plan`.
        cancel: as for `make_plan`.
        block_cache: as for `make_plan`.
        max_strategies: as for `make_plan`.
        one_stage: of the baselines of a pipeline; its own micro-batches if None.
    """
    # Other options may have been chosen for the plan, such as roles of axes for an export.
    own = plan.options.with_values(comparisons=options.solver.comparisons)
    plan = plan.model_copy(update={"options": own})
    if not own.solver.comparisons or not plan.found:
        return plan
    limits = ComparisonLimits(on_progress, cancel, block_cache, max_strategies)
    remade = partial(_remade, graph, plan.mesh, limits)
    return with_comparisons(plan, graph, remade, limits, one_stage)


def make_first_plan(
    graph: Graph, mesh: Mesh, options: PlanOptions, limits: ComparisonLimits
) -> Plan:
    """The first plan of one stage that fits the memory budget; arguments as for `make_plan`."""
    return _with_performance(_plan(graph, mesh, options, limits, quick=True), graph)


def pipeline_bound(
    graph: Graph, mesh: Mesh, options: PlanOptions, limits: ComparisonLimits
) -> float:
    """Lower bound of the seconds of a step of a pipeline on a mesh whose outermost axis is `pp`.

    The busiest rank has at least the mean work of all, whatever the stages; -inf if that is not
    known: sub-meshes may differ, or the time is over.

    Raises:
        GraphError: the graph cannot be planned in this mode.
        OptionError: an option is invalid, or the problem has too many strategies.
    """
    ranks = num_pipeline_ranks(mesh)
    if ranks is None or options.pipeline.sub_meshes == "any":
        return -inf
    devices = sub_mesh(mesh, mesh.num_devices // ranks)
    search = SearchLimits(options.solver.time_limit / 2, limits.cancel, limits.max_strategies)
    try:
        own = on_sub_mesh(options, devices, mesh)
        return whole_bound(graph, devices, own, search, limits.block_cache) / ranks
    except Stopped:
        return -inf


def _remade(graph: Graph, mesh: Mesh, limits: ComparisonLimits, options: PlanOptions) -> Plan:
    """A plan to compare with; its progress is not reported."""
    found = _plan(graph, mesh, options, replace(limits, on_progress=None))
    return _with_performance(found, graph)


def _with_performance(plan: Plan, program: Graph) -> Plan:
    found = None
    if plan.found:
        work = program_work(program, plan.options) if len(plan.stages) == 1 else None
        found = plan_performance(plan, work)
    return plan.model_copy(update={"performance": found})


def _plan(
    graph: Graph, mesh: Mesh, options: PlanOptions, given: ComparisonLimits, *, quick: bool = False
) -> Plan:
    """The plan without comparisons, or a document without stages a little after the time limit.

    Steps of planning have least times of their own, so that a short limit ends with a plan of a
    usual program; together they might take several times the limit.
    """
    start = time.perf_counter()
    latest = start + _LATEST_SHARE * options.solver.time_limit + _LATEST_SECONDS
    try:
        with limited(Limits(latest, most=sys.maxsize)):
            return _planned(graph, mesh, options, given=given, quick=quick)
    except LimitReached as reached:
        status = reached.status or SolveStatus.TIMED_OUT
        seconds = {"search": time.perf_counter() - start}
        return plan_without_stages(
            graph, mesh, options, reason=_WHY_STOPPED[status], status=status, seconds=seconds
        )


def _planned(
    graph: Graph, mesh: Mesh, options: PlanOptions, *, given: ComparisonLimits, quick: bool
) -> Plan:
    """The plan of one stage or of a pipeline, by the least times of the steps of planning."""
    plan_stage = partial(
        make_stage_plan,
        cancel=given.cancel,
        block_cache=given.block_cache,
        max_strategies=given.max_strategies,
    )
    cutter = stage_cutter(graph, options)
    number = num_stages(options, cutter)
    if chooses_export_roles(options):
        devices = mesh if number == 1 else largest_sub_mesh(mesh, options, number)
        made = fastest_export(
            partial(_planned, graph, mesh, given=given, quick=quick), options, devices
        )
        return made.model_copy(update={"id": plan_id(graph, mesh, options)})
    if number == 1:
        return plan_stage(graph, mesh, options, on_progress=given.on_progress, quick=quick)
    check_runs(graph)
    check_checkpointing(graph, options)
    if options.mode == "training":
        check_trainable(graph)
    largest_sub_mesh(mesh, options, number)
    _check_options(options, number)
    least = LeastMemory.of(graph, mesh, options)
    if not least.fits:
        return without_memory(graph, mesh, options, least)
    # Half of the time is for the stages of the pipeline that is found.
    limits = SearchLimits(
        options.solver.time_limit / 2,
        given.cancel,
        given.max_strategies,
        given.on_progress,
        total=options.solver.time_limit,
    )
    plan_one = partial(plan_stage, on_progress=limits.report)
    return _Request(cutter, mesh, options, plan_one, limits, given.block_cache).plan(number)


def _check_options(options: PlanOptions, stages: int | None) -> None:
    """Check that a step can be simulated, and that the schedule decides what is in flight.

    Raises:
        OptionError: it has too many stages and micro-batches, or `in_flight` is given.
    """
    if options.pipeline.in_flight > 1:
        raise OptionError(
            f"in_flight is {options.pipeline.in_flight}, but the schedule of a pipeline says how "
            f"many micro-batches each stage holds: leave it out"
        )
    number = (stages or 2) * options.training.micro_batches
    if number > MAX_ACTIONS:
        raise OptionError(
            f"{stages or 2} stages with {options.training.micro_batches:,} micro-batches run "
            f"{number:,} forwards, but at most {MAX_ACTIONS:,} are simulated: take fewer "
            f"micro-batches or stages"
        )


class _Failure(NamedTuple):
    """Reason why there is no plan.

    Attributes:
        reason: the reason.
        status: infeasible, or timed out: then another run may find one.
    """

    reason: str
    status: SolveStatus = SolveStatus.INFEASIBLE


@dataclass(frozen=True)
class _Request:
    """A request for a pipeline."""

    cutter: StageCutter
    mesh: Mesh
    options: PlanOptions
    plan_stage: Callable[[Graph, Mesh, PlanOptions], Plan]
    limits: SearchLimits
    block_cache: KeyValueStore | None

    @cached_property
    def stages(self) -> EqualStages:
        """Plans stages, equal ones once."""
        quick = QuickPlanner(self.limits, self.block_cache)
        return EqualStages(self.plan_stage, quick.plan, self.block_cache)

    @cached_property
    def cuts(self) -> tuple[int, ...] | None:
        """The cuts that the options determine; None if they are to be chosen."""
        return cuts_of(self.options, self.cutter, self.mesh)

    def plan(self, number: int | None) -> Plan:
        """The fastest pipeline with a number of stages, or with any number if it is None."""
        start = time.perf_counter()
        cuts = self.cuts
        required = required_cuts(self.options, self.cutter) if cuts is None else cuts
        search = PipelineSearch(
            self.cutter,
            self.mesh,
            self.options,
            self.limits,
            cuts=required,
            block_cache=self.block_cache,
        )
        seconds = {"search": 0.0, "plan stages": 0.0}
        document = DocumentBuilder(self.cutter.graph, self.mesh, self.options, seconds)
        try:
            return self._plan(search, document, seconds, number, start)
        except (Stopped, LimitReached) as stopped:
            status = stopped.status or SolveStatus.TIMED_OUT
            return document.without_stages(_WHY_STOPPED[status], status)

    def _plan(
        self,
        search: PipelineSearch,
        document: "DocumentBuilder",
        seconds: dict[str, float],
        number: int | None,
        start: float,
    ) -> Plan:
        failure = _Failure(_WHY_NONE)
        for _ in range(_MAX_ROUNDS):
            candidate = self._best(search, number)
            seconds["search"] += time.perf_counter() - start
            start = time.perf_counter()
            may_be_one = number is None and num_pipeline_ranks(self.mesh) is None
            whole = self._whole(search, candidate) if may_be_one else None
            if whole is not None:
                return whole
            if candidate is None and self.limits.is_over:
                raise self.limits.stopped()
            if candidate is None:
                self._check_schedule(number)
                break
            stages = self._planned_stages(search, candidate)
            seconds["plan stages"] += time.perf_counter() - start
            start = time.perf_counter()
            if isinstance(stages, _Failure):
                failure = stages
                search.reserve_memory()
                continue
            plan = document.with_stages(candidate.schedule, stages, self._bound(candidate, stages))
            if plan.memory is None or plan.memory.peak <= document.budget:
                return plan
            failure = _Failure(_WHY_NONE)
            search.count_all_peaks()
        return document.without_stages(*failure)

    def _whole(self, search: PipelineSearch, candidate: PipelineCandidate | None) -> Plan | None:
        """The plan of one stage on the whole mesh, if it is faster than a pipeline."""
        pipeline = candidate.seconds if candidate else inf
        # When the time is over without a pipeline, one stage is planned without an estimate.
        if candidate is not None or not self.limits.is_over:
            try:
                if search.whole_seconds() >= pipeline:
                    return None
            except Stopped:
                if candidate is not None or self.limits.is_cancelled:
                    return None
        share = max(self.limits.left, _LEAST_SHARE)
        limits = self.options.with_values(stages=1, time_limit=share)
        graph = self.cutter.graph
        # Names of dynamic sizes cannot be replaced by numbers.
        if graph.dynamic is not None:
            plan = self.plan_stage(graph, self.mesh, limits)
        else:
            plan = self.stages.plan(graph, self.mesh, limits).plan
        if plan.costs is None or plan.costs.total >= pipeline:
            return None
        late = plan.provenance.reached_time_limit
        update = {
            "options": self.options,
            "id": plan_id(graph, self.mesh, self.options),
            "graph": GraphSummary.of(graph),
            "certificate": with_statement(plan.certificate, self.options, self.mesh, late=late),
        }
        return plan.model_copy(update=update)

    def _bound(self, candidate: PipelineCandidate, stages: Sequence[PlannedStage]) -> ProvenBound:
        """A lower bound of the step time, with the pipelines for which it holds.

        If the search has none, it is the work of the busiest rank for given cuts, otherwise the
        mean work of the ranks.
        """
        schedule = candidate.schedule
        if candidate.bound > 0:
            return ProvenBound(candidate.bound, all_cuts(candidate))
        known = [one.bound for one in stages if one.bound is not None]
        if self.cuts is not None and len(known) == len(stages):
            work = max(sum(known[stage] for stage in held) for held in schedule.ranks)
            return ProvenBound(max(work, 0.0), GIVEN_CUTS)
        devices = sub_mesh(self.mesh, candidate.stages[0].devices)
        proof = mean_work(candidate)
        try:
            options = on_sub_mesh(self.options, devices, self.mesh)
            work = whole_bound(self.cutter.graph, devices, options, self.limits, self.block_cache)
        except Stopped:
            return ProvenBound(0.0, proof)
        return ProvenBound(max(work, 0.0) / schedule.num_ranks, proof)

    def _best(self, search: PipelineSearch, number: int | None) -> PipelineCandidate | None:
        options, best = self.options, None
        schedule = None if options.pipeline.schedule == "auto" else options.pipeline.schedule
        wanted = (
            None if options.pipeline.stages_per_rank == "auto" else options.pipeline.stages_per_rank
        )
        for ranks, per_rank in self._shapes(number, wanted):
            if self.limits.is_over:
                break
            try:
                found = search.search(
                    ranks,
                    schedule=schedule,
                    stages_per_rank=per_rank,
                    unequal=options.pipeline.sub_meshes == "any",
                    below=best.seconds if best else float("inf"),
                )
            except Stopped:
                if best is None:
                    raise
                break
            best = found or best
            self.limits.incumbent = best.seconds if best else inf
        return best

    def _check_schedule(self, number: int | None) -> None:
        """Raise OptionError if the schedule that is asked for allows none of the shapes."""
        name, options = self.options.pipeline.schedule, self.options
        wanted = (
            None if options.pipeline.stages_per_rank == "auto" else options.pipeline.stages_per_rank
        )
        if name == "auto":
            return
        errors = [
            schedule_error(name, ranks, per_rank, options.training.micro_batches)
            for ranks, per_rank in self._shapes(number, wanted)
            if per_rank is not None
        ]
        if errors and all(errors):
            raise OptionError(errors[0] or "")

    def _shapes(self, number: int | None, per_rank: int | None) -> list[tuple[int, int | None]]:
        """Numbers of pipeline ranks, and of stages per rank."""
        wanted = num_pipeline_ranks(self.mesh)
        if number is None:
            ranks = _rank_numbers(self.mesh) if wanted is None else [wanted]
            return [(one, per_rank) for one in ranks]
        if wanted is not None:
            return [(wanted, number // wanted)] if per_rank in (None, number // wanted) else []
        numbers = [per_rank] if per_rank else [v for v in range(1, number + 1) if number % v == 0]
        return [(number // v, v) for v in numbers if number % v == 0 and number // v > 1]

    def _planned_stages(
        self, search: PipelineSearch, candidate: PipelineCandidate
    ) -> "list[PlannedStage] | _Failure":
        """A plan for each stage, or the reason why one has none."""
        schedule, places = candidate.schedule, candidate.stages
        programs = self.cutter.split([place.node for place in places[1:]])
        stages: list[PlannedStage] = []
        for number, (place, program) in enumerate(zip(places, programs, strict=True)):
            devices = sub_mesh(self.mesh, place.devices)
            limits = stage_options(
                self.options,
                program,
                devices,
                in_flight=schedule.in_flight[number],
                budget=search.budget(schedule, number, place.devices),
            )
            left = self.limits.left
            share = max(left / (len(places) - number), min(LEAST_TIME_LIMIT, left / 2))
            share = max(share, _LEAST_SHARE)
            limits = limits.with_values(time_limit=share)
            # Stages are planned separately: what crosses a cut has the layout that the search has
            # assumed on both sides.
            limits = with_pinned_ends(limits, program, search.costs(place.devices).layouts)
            limits = with_stored_layouts(limits, place, program, stages)
            if self.limits.is_cancelled:
                raise self.limits.stopped()
            self.limits.begin(f"stage {number} of {len(places)}")
            found, times, bound = self.stages.plan(program, devices, limits)
            if times is None:
                if self.limits.is_cancelled:
                    raise self.limits.stopped()
                reason = f"stage {number} of {len(places)}: {found.reason}"
                return _Failure(reason, found.certificate.status)
            stage = found.stages[0].model_copy(
                update={"name": f"stage{number}", "first_device": place.first_device}
            )
            found = found.model_copy(update={"stages": (stage,)})
            stages.append(PlannedStage(place, program, devices, found, times, bound))
        if self.limits.is_cancelled:
            raise self.limits.stopped()
        return stages


def _rank_numbers(mesh: Mesh) -> list[int]:
    """Numbers of pipeline ranks that divide the outermost axes of a mesh, usual ones first."""
    total = mesh.num_devices
    found = []
    for number in range(2, total + 1):
        if total % number == 0:
            try:
                sub_mesh(mesh, total // number)
            except OptionError:
                continue
            found.append(number)
    return sorted(found, key=lambda number: abs(log2(number / _USUAL_RANKS)))
