"""Sentences on a step over time: pipeline, recomputation, micro-batches."""

from collections.abc import Iterator

from autoshard.costs import GATHERED_ONCE, Frequency
from autoshard.graph import graph_from_json
from autoshard.lowering.recompute import run_again
from autoshard.plan.comparisons import RunAgain
from autoshard.plan.document import Plan


def step_sentences(plan: Plan, again: RunAgain) -> tuple[str, ...]:
    """Describe the pipeline of a plan, what backward runs again, and what runs once per step.

    Args:
        plan: a plan with stages.
        again: of the plan.
    """
    return (*_pipeline(plan), *_recomputation(plan, again), *_once(plan))


def runs_again(plan: Plan) -> RunAgain:
    """The gathers and blocks that backward runs again, of all stages of a plan."""
    modules = plan.options.memory.checkpointed_modules
    parts = [run_again(graph_from_json(stage.program), stage, modules) for stage in plan.stages]
    names = RunAgain.model_fields
    return RunAgain(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _pipeline(plan: Plan) -> Iterator[str]:
    if plan.pipeline is None:
        return
    pipeline, number = plan.pipeline, len(plan.stages)
    ranks = "" if number == len(pipeline.ranks) else f" on {len(pipeline.ranks)} pipeline ranks"
    yield (
        f"Pipeline of {number} stages{ranks}, schedule {pipeline.schedule}, "
        f"{pipeline.micro_batches} micro-batches, idle {pipeline.bubble:.1%} of the step."
    )


def _recomputation(plan: Plan, again: RunAgain) -> Iterator[str]:
    """Activation checkpointing, and gathers of activations that backward repeats."""
    number = sum(len(stage.checkpoints) for stage in plan.stages)
    if number:
        kind = "modules" if plan.options.memory.checkpointed_modules else "blocks"
        is_whole = again.recomputed == number
        what = f"{number} of {again.blocks} {kind}" if is_whole else f"{number} parts"
        is_chosen = plan.options.memory.activation_checkpointing == "auto"
        yield f"Activation checkpointing on {what}{' to fit the memory' if is_chosen else ''}."
    if again.gathered_again:
        yield (
            f"Backward gathers {again.gathered_again} of {again.gathered} gathered parameters "
            f"again (FSDP's reshard_after_forward)."
        )
    parameters = {p.name for stage in plan.stages for p in stage.parameters}
    values = {c.value for stage in plan.stages for c in stage.reshardings if c.regather}
    if activations := len(values - parameters):
        yield f"Backward gathers {activations} activations again, which are kept sharded."


def _once(plan: Plan) -> Iterator[str]:
    """Communication of parameters that runs once per step of several micro-batches."""
    number = plan.stages[0].micro_batches
    if number == 1:
        return
    parameters = {p.name for stage in plan.stages for p in stage.parameters}
    moved = [c for stage in plan.stages for c in stage.reshardings if c.value in parameters]
    gathered = {c.value for c in moved if c.frequency in GATHERED_ONCE}
    reduced = {c.value for c in moved if c.frequency is Frequency.STEP}
    yield (
        f"{number} micro-batches per step: of {len(parameters)} parameters {len(gathered)} are "
        f"gathered once per step, and the gradients of {len(reduced)} are reduced once."
    )
