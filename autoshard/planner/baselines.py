"""Comparisons of a plan: with usual kinds of parallelism, and with no restrictions.

A baseline is planned as every plan is, by the same cost model, constrained to the pattern that its
`algo` names. It is the first plan that fits the memory budget: the fastest layouts of the pattern,
with what is recomputed chosen for them, on the fastest of the meshes of the pattern on the same
devices.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf
from typing import Any, NamedTuple

from autoshard.base.limits import LimitReached, limited
from autoshard.base.outcome import TIME_LIMIT_REACHED, SolveStatus
from autoshard.base.quantities import format_bytes
from autoshard.constraints import (
    check_batch,
    dim_origins,
    parameter_shards,
    plan_constraints,
    sharding_axes,
)
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.graph import Graph, GraphLike, to_graph
from autoshard.lowering.instructions import summed_collectives
from autoshard.lowering.recompute import run_again
from autoshard.mesh import Mesh, MeshLike, mesh_text, to_mesh
from autoshard.plan.comparisons import Baseline, Unrestricted
from autoshard.plan.document import Plan
from autoshard.plan.options import Family, PlanOptions, to_options
from autoshard.plan.options.restrictions import option_label, restrictions, without_restrictions
from autoshard.plan.predictions import Certificate, Performance
from autoshard.plan.stage import Stage
from autoshard.planner.budget.rounds import Outcome
from autoshard.planner.budget.search import BudgetSearch
from autoshard.planner.families import Form, family_forms
from autoshard.planner.formulation.formulating import check_size, check_trainable, work_limits
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.planner import outcome_certificate
from autoshard.pricing.performance import pattern_category, step_performance
from autoshard.pricing.prices import Prices
from autoshard.pricing.throughput import StepWork, program_work
from autoshard.solve import CancelToken, KeyValueStore, Progress

NAMES: Mapping[Family, str] = {
    "fsdp2": "FSDP2 (ZeRO-3)",
    "hsdp": "HSDP",
    "megatron": "Megatron TP",
    "megatron-sp": "Megatron TP + SP",
    "ddp": "DDP",
}
"""Names of the patterns; in this order they are planned, as DDP may need the most time."""

_SHARE_OF_TIME = 0.5
"""Share of the time limit for all comparisons."""
_MORE_TIME = "a faster form may exist: the time limit of comparisons ended"
_MAX_NAMES = 3
"""Maximum number of parameters that a remark names."""


@dataclass(frozen=True)
class ComparisonLimits:
    """Limits of comparisons; the members are those of `make_plan`."""

    on_progress: Callable[[Progress], None] | None = None
    cancel: CancelToken | None = None
    block_cache: KeyValueStore | None = None
    max_strategies: int | None = None
    start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    @property
    def is_cancelled(self) -> bool:
        """True if the caller stopped the request."""
        return self.cancel is not None and self.cancel.is_set()

    def begin(self, phase: str) -> None:
        """Report what is planned next."""
        if self.on_progress is not None:
            self.on_progress(Progress(phase, inf, -inf, self.seconds))


class OneStage(NamedTuple):
    """The step of a request without a pipeline, in other micro-batches.

    Attributes:
        graph: the program of a micro-batch.
        options: with their number.
    """

    graph: Graph
    options: PlanOptions


class Cutoff:
    """A cancel token that ends planning once a known plan is proven to be nearly as fast as any.

    Args:
        seconds: a step of the known plan; inf to make a plan in any case.
        relative_gap: relative difference by which a plan that is not made may be faster.
        cancel: a token that ends planning as well.
    """

    def __init__(
        self, seconds: float, relative_gap: float = 0.0, cancel: CancelToken | None = None
    ) -> None:
        self._seconds = seconds
        self._least = (1 - relative_gap) * seconds
        self._cancel = cancel
        self._bound = -inf

    def report(self, progress: Progress) -> None:
        """Look at the progress of planning."""
        self._bound = max(self._bound, progress.bound)

    def is_set(self) -> bool:
        """True if no plan is faster by more than the gap; an infinite bound: there is none."""
        is_cancelled = self._cancel is not None and self._cancel.is_set()
        return is_cancelled or self._least < self._bound < inf

    @property
    def bound(self) -> float:
        """Proven lower bound of all plans, seconds."""
        return self._bound


def compare_baselines(
    graph: GraphLike,
    mesh: MeshLike,
    options: PlanOptions | None = None,
    limits: ComparisonLimits | None = None,
    **single_options: Any,
) -> tuple[Baseline, ...]:
    """Predictions of DDP, FSDP2, HSDP and Megatron for a graph on the devices of a mesh.

    Each is planned on meshes of its own on these devices, of which the fastest is returned: all
    in one axis for DDP and FSDP2, every number of ranks that shard parameters for HSDP, every
    number in a node that shards weights for Megatron, with and without a distributed optimizer.

    Args:
        graph: as for `make_plan`.
        mesh: as for `make_plan`.
        options: of planning. Restrictions and pipeline stages are left out. All baselines together
            take about half of the time limit at most.
        limits: cancellation, progress, cache.
        **single_options: single members of `PlanOptions`, which replace those of `options`.

    Returns:
        One baseline per pattern; none if the mesh has a single device.

    Raises:
        GraphError: the graph cannot be planned in this mode.
        OptionError: an option is invalid.

    Example:
        >>> for baseline in compare_baselines(graph, make_mesh((2, 4))):
        ...     print(baseline.name, baseline.step_time or baseline.reason)
    """
    program, devices = to_graph(graph), to_mesh(mesh)
    asked = to_options(options, single_options)
    if asked.mode == "training":
        check_trainable(program)
    return _Baselines(program, devices, asked, limits or ComparisonLimits()).all()


def with_comparisons(
    plan: Plan,
    graph: Graph,
    make: Callable[[PlanOptions], Plan],
    limits: ComparisonLimits,
    one_stage: OneStage | None = None,
) -> Plan:
    """A plan with its baselines, and with the cost of its restrictions.

    Comparisons that a cancelled request has no more time for are left out.

    Args:
        plan: the plan.
        graph: its program.
        make: plans the program with other options.
        limits: cancellation, progress, cache.
        one_stage: of the baselines of a pipeline; its own if None.
    """
    unrestricted = _unrestricted(plan, make, limits)
    bound = _bound_of_all(plan, unrestricted)
    program, options = one_stage or OneStage(graph, plan.options)
    baselines = _Baselines(program, plan.mesh, options, limits, bound).all()
    seconds = {**plan.provenance.wall_time, "compare": round(limits.seconds, 6)}
    return plan.model_copy(
        update={
            "baselines": baselines,
            "unrestricted": unrestricted,
            "provenance": plan.provenance.model_copy(update={"wall_time": seconds}),
        }
    )


def _unrestricted(
    plan: Plan, make: Callable[[PlanOptions], Plan], limits: ComparisonLimits
) -> Unrestricted | None:
    """The plan without the restrictions of the options; None if there are none."""
    options = plan.options
    obeyed = restrictions(options)
    if not obeyed or limits.is_cancelled:
        return None
    limits.begin("comparing: without restrictions")
    seconds = options.solver.time_limit * _SHARE_OF_TIME / 2
    free = without_restrictions(options).with_values(comparisons=False, time_limit=seconds)
    found = make(free)
    return Unrestricted(
        restrictions=obeyed,
        certificate=found.certificate,
        costs=found.costs,
        memory=found.memory,
        performance=found.performance,
        collectives=found.collectives,
        bubble=None if found.pipeline is None else found.pipeline.bubble,
    )


def _bound_of_all(plan: Plan, unrestricted: Unrestricted | None) -> float:
    """Lower bound of the time of all plans of one stage without restrictions; -inf if unknown."""
    free: Plan | Unrestricted = plan if unrestricted is None else unrestricted
    is_known = plan.options.pipeline.stages in (None, 1) and plan.pipeline is None
    is_free = unrestricted is not None or not restrictions(plan.options)
    bound = free.certificate.bound if is_known and is_free else None
    return -inf if bound is None else bound


@dataclass(frozen=True)
class _Baselines:
    """Plans the baselines of one request.

    Attributes:
        graph: the program.
        mesh: the devices.
        options: of the request.
        limits: cancellation, progress, cache.
        bound: lower bound of the time of all plans of one stage on the mesh, and so of each
            baseline on it.
    """

    graph: Graph
    mesh: Mesh
    options: PlanOptions
    limits: ComparisonLimits
    bound: float = -inf

    @cached_property
    def work(self) -> StepWork:
        """The work of a step, which all baselines do."""
        return program_work(self.graph, self.options)

    def all(self) -> tuple[Baseline, ...]:
        """All baselines that there is time for."""
        if self.mesh.num_devices == 1:
            return ()
        end = self.limits.seconds + _SHARE_OF_TIME * self.options.solver.time_limit
        prices = cache(lambda mesh: Prices(self.graph, mesh, self.options))
        found = []
        for number, pattern in enumerate(NAMES):
            if self.limits.is_cancelled:
                break
            remaining = end - self.limits.seconds
            latest = self.limits.seconds + remaining / (len(NAMES) - number)
            found.append(self._best(pattern, latest, prices))
        return tuple(found)

    def _best(self, pattern: Family, latest: float, prices: Callable[[Mesh], Prices]) -> Baseline:
        """The fastest form of a pattern, or the reason why there is none."""
        forms = family_forms(self.graph, self.mesh, pattern)
        if not forms:
            number = self.mesh.num_devices
            return _without_plan(pattern, f"{number} devices have no such division into axes")
        best, too_large, remarks = _late(pattern), list[_TooLarge](), list[str]()
        for form in forms:
            seconds = latest - self.limits.seconds
            if seconds <= 0 or self.limits.is_cancelled:
                remarks = [_MORE_TIME]
                break
            self.limits.begin(f"comparing: {NAMES[pattern]} on {mesh_text(form.mesh)}")
            is_same = form.mesh.axis_sizes == self.mesh.axis_sizes
            bound = self.bound if is_same else -inf
            on_mesh = _OnMesh(pattern, form, prices(form.mesh), self.work, bound)
            token = Cutoff(best.step_time or inf, cancel=self.limits.cancel)
            found = on_mesh.planned(self._options(pattern, form), self.limits, token, seconds)
            if isinstance(found, _TooLarge):
                too_large.append(found)
            elif form is forms[0] or _seconds(found) < _seconds(best):
                best = found
        if best.found:
            remarks = [*dict.fromkeys((*remarks, *best.remarks))]
            return best.model_copy(update={"remarks": tuple(remarks)})
        if not too_large:
            return best
        return min(too_large, key=lambda one: one.formulation.min_input_bytes).baseline

    def _options(self, pattern: Family, form: Form) -> PlanOptions:
        """The options of a baseline: the request's, but restricted to the pattern only."""
        free = without_restrictions(self.options)
        own = {"algo": pattern, "distributed_optimizer": form.distributed}
        return free.with_values(**own, stages=1, comparisons=False)


def _seconds(baseline: Baseline) -> float:
    return baseline.step_time or inf


@dataclass(frozen=True)
class _OnMesh:
    """Plans one form of a pattern.

    Attributes:
        pattern: its name.
        form: the mesh, and its setting.
        prices: the cost model on the mesh.
        work: of a step.
        bound: lower bound of the time of all plans of one stage on the mesh.
    """

    pattern: Family
    form: Form
    prices: Prices
    work: StepWork
    bound: float

    @cached_property
    def axes(self) -> NontrivialAxes:
        """The axes of several devices."""
        return NontrivialAxes.of(self.form.mesh)

    @property
    def graph(self) -> Graph:
        """The program."""
        return self.prices.graph

    def planned(
        self, own: PlanOptions, limits: ComparisonLimits, token: Cutoff, seconds: float
    ) -> "Baseline | _TooLarge":
        """The form, or the reason why there is none, or why it was not planned to its end."""
        pattern = self.pattern
        try:
            if pattern in {"megatron", "megatron-sp"}:
                check_batch(dim_origins(self.graph), self.form.data_sizes)
            constraints = plan_constraints(self.graph, self.form.mesh, own)
            with limited(work_limits(seconds, limits.cancel)):
                formulation = Formulation(self.prices, constraints)
            check_size(formulation, limits.max_strategies)
        except LimitReached:
            return _late(pattern)
        except OptionError as error:
            reason = str(error).removeprefix(f"{option_label('algo', pattern)}: ")
            return _without_plan(pattern, reason)
        search = BudgetSearch(
            formulation,
            own,
            seconds=seconds,
            on_progress=token.report,
            cancel=token,
            block_cache=limits.block_cache,
        )
        outcome = search.run(formulation.prices.memory_budget, quick=True, bound=self.bound)
        if outcome.plan is None:
            if token.is_set() or not outcome.is_conflict:
                return _late(pattern)
            return _TooLarge(self, own, search, formulation, outcome)
        stage = outcome.plan.stage
        if pattern in {"megatron", "megatron-sp"} and not _shards_weights(stage, self.axes):
            return _without_plan(
                pattern,
                f"no weight can be sharded by columns or rows over {self.axes.sizes[-1]} devices",
            )
        return Baseline(
            algo=pattern,
            name=NAMES[pattern],
            axes=tuple((axis.name, axis.size) for axis in self.form.mesh.axes),
            distributed_optimizer=self.form.distributed,
            micro_batches=own.training.micro_batches,
            certificate=outcome_certificate(outcome, own, self.form.mesh),
            costs=outcome.plan.costs,
            memory=outcome.plan.memory,
            performance=self._performance(own, outcome.plan.costs.total),
            collectives=summed_collectives([outcome.plan.lowering]),
            again=run_again(self.graph, stage, own.memory.checkpointed_modules),
            remarks=tuple(self._remarks(late=TIME_LIMIT_REACHED in outcome.solution.statistics)),
        )

    def _performance(self, own: PlanOptions, seconds: float) -> Performance:
        category = pattern_category(self.pattern, self.work, training=own.mode == "training")
        return step_performance(self.work, self.form.mesh, seconds, category)

    def _remarks(self, *, late: bool) -> Iterator[str]:
        """Differences between a plan and what the framework does; and if time was short."""
        if late:
            yield _MORE_TIME
        sizes = [self.axes.sizes[axis] for axis in sharding_axes(self.axes, self.pattern)]
        if not sizes:
            return
        parameters = self.graph.parameters
        unusual = [
            p.target
            for p in parameters
            if any(dim != 0 for dim in parameter_shards(self.graph.values[p.name].shape, sizes))
        ]
        if unusual:
            more = f" and {len(unusual) - _MAX_NAMES} more" if len(unusual) > _MAX_NAMES else ""
            yield (
                f"{len(unusual)} of {len(parameters)} parameters are not Shard(0), since their dim "
                f"0 does not divide over the devices: {', '.join(unusual[:_MAX_NAMES])}{more}"
            )


@dataclass(frozen=True)
class _TooLarge:
    """A form that does not fit; what it needs is searched only where no other form fits.

    Attributes:
        form: it.
        options: its options.
        search: that has found no plan.
        formulation: of its problem.
        outcome: of the search.
    """

    form: _OnMesh
    options: PlanOptions
    search: BudgetSearch
    formulation: Formulation
    outcome: Outcome

    @property
    def baseline(self) -> Baseline:
        """The form without a plan, with the memory that it needs."""
        pattern, mesh = self.form.pattern, self.form.form.mesh
        budget, least = self.formulation.prices.memory_budget, self.formulation.min_input_bytes
        certificate = outcome_certificate(self.outcome, self.options, mesh)
        _, smallest = self.search.min_usage_plan
        if smallest is None and least <= budget:
            reason = "an operator of the program does not allow this pattern"
            return _without_plan(pattern, reason).model_copy(update={"certificate": certificate})
        needed = least if smallest is None else smallest.memory.peak
        more = "more than " if smallest is None else ""
        return Baseline(
            algo=pattern,
            name=NAMES[pattern],
            axes=tuple((axis.name, axis.size) for axis in mesh.axes),
            distributed_optimizer=self.form.form.distributed,
            micro_batches=self.options.training.micro_batches,
            certificate=certificate,
            reason=f"does not fit: needs {more}{format_bytes(needed)} of {format_bytes(budget)}",
            needed_memory=needed,
        )


def _shards_weights(stage: Stage, axes: NontrivialAxes) -> bool:
    return any("Shard" in parameter.placements[axes.axes[-1]] for parameter in stage.parameters)


def _without_plan(pattern: Family, reason: str) -> Baseline:
    return Baseline(algo=pattern, name=NAMES[pattern], reason=reason)


def _late(pattern: Family) -> Baseline:
    certificate = Certificate(status=SolveStatus.TIMED_OUT, objective=None, bound=None, gap=None)
    reason = "not planned within the time limit of comparisons; raise time_limit"
    return _without_plan(pattern, reason).model_copy(update={"certificate": certificate})
