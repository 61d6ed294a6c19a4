"""Performance of a step: throughput, and how well such steps were predicted."""

from autoshard.mesh import Mesh
from autoshard.plan.document import Plan
from autoshard.plan.options import Family
from autoshard.plan.predictions import Performance
from autoshard.pricing.accuracy import LayoutCategory, find_accuracy, hardware_of
from autoshard.pricing.axis_roles import AxisRole, find_roles
from autoshard.pricing.throughput import StepWork, plan_work, utilisation


def plan_performance(plan: Plan, work: StepWork | None = None) -> Performance:
    """The performance of a plan.

    Args:
        plan: a plan with stages.
        work: of a step; computed from the programs in the plan if None.
    """
    assert plan.costs is not None
    work = work or plan_work(plan)
    return step_performance(work, plan.mesh, plan.costs.total, _category(plan, work))


def step_performance(
    work: StepWork, mesh: Mesh, seconds: float, category: LayoutCategory | None
) -> Performance:
    """The performance of a step.

    Args:
        work: of the step, on all devices.
        mesh: the devices.
        seconds: predicted.
        category: of the layout; None if no published run does the like.
    """
    found = find_accuracy(category, mesh)
    samples = None if work.batch is None else work.batch.samples
    tokens = None if work.batch is None else work.batch.tokens
    return Performance(
        samples_per_second=samples / seconds if samples and seconds else None,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        mfu=utilisation(work, mesh, seconds),
        error=None if found is None else found.error,
        comparison=_not_compared(category, mesh) if found is None else found.statement,
    )


def _not_compared(category: LayoutCategory | None, mesh: Mesh) -> str:
    generation = hardware_of(mesh)
    if generation is None:
        return "not compared with measurements on this hardware"
    kind = "inference of several tokens" if category is None else category
    return f"not compared with measurements of this kind ({kind}, {generation} GPUs)"


def pattern_category(pattern: Family, work: StepWork, *, training: bool) -> LayoutCategory | None:
    """The category of the plans of a pattern of one stage."""
    if not training:
        return _inference(work)
    if work.has_experts:
        return LayoutCategory.EXPERTS
    is_tensor = pattern in {"megatron", "megatron-sp"}
    return LayoutCategory.MODEL_PARALLEL if is_tensor else LayoutCategory.DATA_PARALLEL


def _category(plan: Plan, work: StepWork) -> LayoutCategory | None:
    if plan.options.mode == "inference":
        return _inference(work)
    if work.has_experts:
        return LayoutCategory.EXPERTS
    if plan.pipeline is not None:
        return LayoutCategory.MODEL_PARALLEL
    shared = {AxisRole.FEATURES, AxisRole.SEQUENCE}
    is_shared = any(use.main_role in shared for use in find_roles(plan).axes)
    return LayoutCategory.MODEL_PARALLEL if is_shared else LayoutCategory.DATA_PARALLEL


def _inference(work: StepWork) -> LayoutCategory | None:
    """Published runs of inference decode one token of a sequence at a time."""
    is_decoding = work.batch is not None and work.batch.sequence == 1
    return LayoutCategory.DECODING if is_decoding else None
