"""Comparisons of a plan: with usual kinds of parallelism, and with no restrictions.

A baseline is planned as every plan is, by the same cost model, constrained to the pattern that its
`algo` names. It is the first plan that fits the memory budget: the fastest layouts of the pattern,
with what is recomputed chosen for them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from autoshard.base.limits import LimitReached, limited
from autoshard.base.outcome import SolveStatus
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
from autoshard.lowering.recompute import recomputed
from autoshard.mesh import Mesh, MeshLike, to_mesh
from autoshard.plan.comparisons import Baseline, Unrestricted
from autoshard.plan.document import Plan
from autoshard.plan.options import Family, PlanOptions, to_options
from autoshard.plan.options.restrictions import option_label, restrictions, without_restrictions
from autoshard.plan.predictions import Certificate, Performance
from autoshard.plan.stage import Stage
from autoshard.planner.budget.rounds import Outcome
from autoshard.planner.budget.search import BudgetSearch
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


def compare_baselines(
    graph: GraphLike,
    mesh: MeshLike,
    options: PlanOptions | None = None,
    limits: ComparisonLimits | None = None,
    **single_options: Any,
) -> tuple[Baseline, ...]:
    """Predictions of DDP, FSDP2, HSDP and Megatron for a graph on a mesh.

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
    plan: Plan, graph: Graph, make: Callable[[PlanOptions], Plan], limits: ComparisonLimits
) -> Plan:
    """A plan with its baselines, and with the cost of its restrictions.

    Comparisons that a cancelled request has no more time for are left out.

    Args:
        plan: the plan.
        graph: its program.
        make: plans the program with other options.
        limits: cancellation, progress, cache.
    """
    unrestricted = _unrestricted(plan, make, limits)
    bound = _bound_of_all(plan, unrestricted)
    baselines = _Baselines(graph, plan.mesh, plan.options, limits, bound).all()
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
        bound: lower bound of the time of all plans of one stage, and so of each baseline.
    """

    graph: Graph
    mesh: Mesh
    options: PlanOptions
    limits: ComparisonLimits
    bound: float = -inf

    @cached_property
    def prices(self) -> Prices:
        """The cost model, which all baselines share."""
        return Prices(self.graph, self.mesh, self.options)

    @cached_property
    def work(self) -> StepWork:
        """The work of a step, which all baselines do."""
        return program_work(self.graph, self.options)

    @cached_property
    def axes(self) -> NontrivialAxes:
        """The axes of several devices."""
        return NontrivialAxes.of(self.mesh)

    def all(self) -> tuple[Baseline, ...]:
        """All baselines that there is time for."""
        if self.mesh.num_devices == 1:
            return ()
        end = self.limits.seconds + _SHARE_OF_TIME * self.options.solver.time_limit
        found = []
        for number, pattern in enumerate(NAMES):
            remaining = end - self.limits.seconds
            if self.limits.is_cancelled:
                break
            self.limits.begin(f"comparing: {NAMES[pattern]}")
            if remaining > 0:
                found.append(self._planned(pattern, remaining / (len(NAMES) - number)))
            else:
                found.append(_late(pattern))
        return tuple(found)

    def _planned(self, pattern: Family, seconds: float) -> Baseline:
        """One baseline, or the reason why there is none."""
        own = self._options(pattern)
        try:
            if pattern in {"megatron", "megatron-sp"}:
                check_batch(dim_origins(self.graph), self.axes.sizes[:-1])
            constraints = plan_constraints(self.graph, self.mesh, own)
            with limited(work_limits(seconds, self.limits.cancel)):
                formulation = Formulation(self.prices, constraints)
            check_size(formulation, self.limits.max_strategies)
        except LimitReached:
            return _late(pattern)
        except OptionError as error:
            reason = str(error).removeprefix(f"{option_label('algo', pattern)}: ")
            return _without_plan(pattern, reason)
        search = BudgetSearch(
            formulation,
            own,
            seconds=seconds,
            cancel=self.limits.cancel,
            block_cache=self.limits.block_cache,
        )
        outcome = search.run(formulation.prices.memory_budget, quick=True, bound=self.bound)
        if outcome.plan is None:
            return self._not_found(pattern, search, formulation, outcome)
        stage = outcome.plan.stage
        if pattern in {"megatron", "megatron-sp"} and not _shards_weights(stage, self.axes):
            return _without_plan(
                pattern,
                f"no weight can be sharded by columns or rows over {self.axes.sizes[-1]} devices",
            )
        return Baseline(
            algo=pattern,
            name=NAMES[pattern],
            certificate=outcome_certificate(outcome, own, self.mesh),
            costs=outcome.plan.costs,
            memory=outcome.plan.memory,
            performance=self._performance(pattern, outcome.plan.costs.total),
            collectives=summed_collectives([outcome.plan.lowering]),
            remarks=(*self._remarks(pattern), *self._kept_gathered(pattern, stage)),
        )

    def _performance(self, pattern: Family, seconds: float) -> Performance:
        is_training = self.options.mode == "training"
        category = pattern_category(pattern, self.work, training=is_training)
        return step_performance(self.work, self.mesh, seconds, category)

    def _options(self, pattern: Family) -> PlanOptions:
        """The options of a baseline: the request's, but restricted to the pattern only."""
        update = {"algo": pattern, "stages": 1, "comparisons": False}
        return without_restrictions(self.options).with_values(**update)

    def _not_found(
        self, pattern: Family, search: BudgetSearch, formulation: Formulation, outcome: Outcome
    ) -> Baseline:
        """A baseline that does not fit, or that there was no time for."""
        if self.limits.is_cancelled or not outcome.is_conflict:
            return _late(pattern)
        budget, least = formulation.prices.memory_budget, formulation.min_input_bytes
        certificate = outcome_certificate(outcome, self._options(pattern), self.mesh)
        _, smallest = search.min_usage_plan
        if smallest is None and least <= budget:
            reason = "an operator of the program does not allow this pattern"
            return _without_plan(pattern, reason).model_copy(update={"certificate": certificate})
        needed = least if smallest is None else smallest.memory.peak
        more = "more than " if smallest is None else ""
        return Baseline(
            algo=pattern,
            name=NAMES[pattern],
            certificate=certificate,
            reason=f"does not fit: needs {more}{format_bytes(needed)} of {format_bytes(budget)}",
            needed_memory=needed,
        )

    def _remarks(self, pattern: Family) -> tuple[str, ...]:
        """Differences between a plan and what the framework does."""
        sizes = [self.axes.sizes[axis] for axis in sharding_axes(self.axes, pattern)]
        if not sizes:
            return ()
        parameters = self.graph.parameters
        unusual = [
            p.target
            for p in parameters
            if any(dim != 0 for dim in parameter_shards(self.graph.values[p.name].shape, sizes))
        ]
        if not unusual:
            return ()
        more = f" and {len(unusual) - _MAX_NAMES} more" if len(unusual) > _MAX_NAMES else ""
        remark = (
            f"{len(unusual)} of {len(parameters)} parameters are not Shard(0), since their dim 0 "
            f"does not divide over the devices: {', '.join(unusual[:_MAX_NAMES])}{more}"
        )
        return (remark,)

    def _kept_gathered(self, pattern: Family, stage: Stage) -> Iterator[str]:
        """Parameters that stay gathered after forward."""
        if pattern not in {"fsdp2", "hsdp"} or self.options.mode != "training":
            return
        names = {parameter.name for parameter in stage.parameters}
        gathered = [r.use for r in stage.reshardings if r.value in names]
        again = recomputed(self.graph, stage).reshardings
        kept = sum(use not in again for use in gathered)
        if kept:
            yield (
                f"{kept} of {len(gathered)} parameters stay gathered until their backward "
                "(reshard_after_forward=False)"
            )


def _shards_weights(stage: Stage, axes: NontrivialAxes) -> bool:
    return any("Shard" in parameter.placements[axes.axes[-1]] for parameter in stage.parameters)


def _without_plan(pattern: Family, reason: str) -> Baseline:
    return Baseline(algo=pattern, name=NAMES[pattern], reason=reason)


def _late(pattern: Family) -> Baseline:
    certificate = Certificate(status=SolveStatus.TIMED_OUT, objective=None, bound=None, gap=None)
    reason = "not planned within the time limit of comparisons; raise time_limit"
    return _without_plan(pattern, reason).model_copy(update={"certificate": certificate})
