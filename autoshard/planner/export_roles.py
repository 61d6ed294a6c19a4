"""Plans for an export target: the fastest among the roles that the target can give to axes."""

import time
from collections.abc import Callable, Sequence
from math import inf

from autoshard.base.outcome import SolveStatus, relative_gap
from autoshard.constraints import export_roles
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.mesh import Mesh
from autoshard.plan.certificate import with_statement
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.plan.predictions import Certificate

_LEAST_SECONDS = 1.0
"""Least time limit of the plan with one way of giving roles."""


def chooses_export_roles(options: PlanOptions) -> bool:
    """True if the roles of axes in an export are to be chosen."""
    wanted = options.constraints
    return wanted.exportable_to is not None and wanted.export_roles is None


def fastest_export(make: Callable[[PlanOptions], Plan], options: PlanOptions, mesh: Mesh) -> Plan:
    """The fastest plan over all ways in which an export target can use the axes.

    Its bound is the smallest of the bounds of all ways. Its options have the roles that it gives.

    Args:
        make: plans with given roles.
        options: of the request, without roles.
        mesh: the devices of a stage.

    Raises:
        OptionError: the target can use the axes in no way.
    """
    wanted, limit = options.constraints, options.solver.time_limit
    assert wanted.exportable_to is not None, "only plans for an export have roles"
    ways = export_roles(NontrivialAxes.of(mesh), wanted.exportable_to, wanted.batch_axis)
    start, found, error = time.perf_counter(), list[Plan](), None
    for number, roles in enumerate(ways):
        left = limit - (time.perf_counter() - start)
        seconds = max(left / (len(ways) - number), min(limit, _LEAST_SECONDS))
        try:
            found.append(make(options.with_values(export_roles=roles, time_limit=seconds)))
        except OptionError as refused:
            error = error or refused
            continue
        if found[-1].certificate.status is SolveStatus.CANCELLED:
            break
    if not found:
        assert error is not None, "each way has a plan or an error"
        raise error
    return _best(found, options)


def _best(found: Sequence[Plan], asked: PlanOptions) -> Plan:
    """The fastest of plans with the certificate of all; the first document if there is none."""
    plans = [plan for plan in found if plan.costs is not None]
    if not plans:
        unproven = (p for p in found if p.certificate.status is not SolveStatus.INFEASIBLE)
        return _as_asked(next(unproven, found[0]), asked)
    best = min(plans, key=_step_time)
    loosest = min(found, key=_bound)
    objective, bound = _step_time(best), min(_bound(loosest), _step_time(best))
    known = bound if bound > -inf else None
    gap = None if known is None else relative_gap(objective, known)
    is_optimal = gap is not None and gap <= asked.solver.relative_gap
    status = SolveStatus.OPTIMAL if is_optimal else SolveStatus.FEASIBLE
    if any(plan.certificate.status is SolveStatus.CANCELLED for plan in found):
        status = SolveStatus.CANCELLED
    certificate = Certificate(status=status, objective=objective, bound=known, gap=gap)
    pipeline = best.pipeline
    if pipeline is not None and loosest.pipeline is not None:
        pipeline = pipeline.model_copy(update={"proof": loosest.pipeline.proof})
    proof = None if pipeline is None else pipeline.proof
    late = any(plan.provenance.reached_time_limit for plan in found)
    stated = with_statement(certificate, asked, best.mesh, proof, late=late)
    return _as_asked(best, asked).model_copy(update={"certificate": stated, "pipeline": pipeline})


def _as_asked(plan: Plan, asked: PlanOptions) -> Plan:
    """A plan with the time limit of the request, and the roles that it gives."""
    options = plan.options.with_values(time_limit=asked.solver.time_limit)
    return plan.model_copy(update={"options": options})


def _step_time(plan: Plan) -> float:
    return inf if plan.costs is None else plan.costs.total


def _bound(plan: Plan) -> float:
    """Lower bound of all plans with the roles of a plan; infinity if there are none."""
    if plan.certificate.status is SolveStatus.INFEASIBLE:
        return inf
    return -inf if plan.certificate.bound is None else plan.certificate.bound
