"""Plans whose stages are all the same, for what reads schedules and not programs."""

from autoshard.plan import Plan
from autoshard.plan.document import Pipeline, StageSummary, StageTimes
from autoshard.schedules.schedule import Schedule


def equal_stages_plan(plan: Plan, schedule: Schedule, times: StageTimes) -> Plan:
    """A plan with many stages like the one of a given plan, as a pipeline."""
    assert plan.costs is not None
    assert plan.memory is not None
    summary = StageSummary(
        certificate=plan.certificate,
        times=times,
        costs=plan.costs,
        memory=plan.memory,
        collectives=plan.collectives,
    )
    pipeline = Pipeline(
        schedule=schedule.name,
        micro_batches=schedule.micro_batches,
        ranks=schedule.ranks,
        arguments=(),
        in_spec="",
        stages=(summary,) * schedule.num_stages,
        transfers=((),) * (schedule.num_stages - 1),
        bubble=0.0,
        proof="",
    )
    stages = plan.stages * schedule.num_stages
    return plan.model_copy(update={"pipeline": pipeline, "stages": stages})
