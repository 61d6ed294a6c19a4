"""The plan of one pipeline stage by itself, as a plan of its program on its devices."""

from autoshard.errors import PlanError
from autoshard.graph import Graph, graph_from_json
from autoshard.plan.document import GraphSummary, Plan
from autoshard.plan.options.of_stages import stage_options, with_pinned_ends
from autoshard.plan.stage import Stage
from autoshard.plan.sub_meshes import stage_mesh


def stage_plan(plan: Plan, number: int) -> tuple[Plan, Graph]:
    """One stage of a pipeline as a plan, and its program.

    Its costs are those of all micro-batches of a step; what it receives and sends is pinned to the
    layouts of the pipeline.

    Args:
        plan: a plan of several stages.
        number: the number of the stage.

    Raises:
        PlanError: the plan is not a pipeline, or has no such stage.
    """
    pipeline = plan.pipeline
    if pipeline is None or not 0 <= number < len(plan.stages):
        raise PlanError(f"the plan has no pipeline stage {number}")
    stage, summary = plan.stages[number], pipeline.stages[number]
    program, mesh = graph_from_json(stage.program), stage_mesh(plan.mesh, stage)
    budget = summary.memory.budget or mesh.topology.device.memory
    options = stage_options(plan.options, program, mesh, in_flight=stage.in_flight, budget=budget)
    layouts = {i.name: i.layout for i in stage.inputs}
    layouts |= {o.name: o.layout for o in stage.outputs if program.outputs[o.position].sent}
    found = plan.model_copy(
        update={
            "certificate": summary.certificate,
            "graph": GraphSummary.of(program),
            "mesh": mesh,
            "options": with_pinned_ends(options, program, layouts),
            "costs": summary.costs,
            "memory": summary.memory,
            "performance": None,
            "collectives": summary.collectives,
            "stages": (stage,),
            "pipeline": None,
        }
    )
    return found, program


def only_stage(plan: Plan, what: str) -> Stage:
    """The stage of a plan that has just one.

    Args:
        plan: the plan.
        what: what needs it, for the message.

    Raises:
        PlanError: the document has no plan, or the plan has several stages.
    """
    if not plan.found:
        raise PlanError(f"the document has no plan: {plan.reason}")
    if plan.pipeline is not None:
        raise PlanError(
            f"the plan is a pipeline of {len(plan.stages)} stages, and {what} needs a plan of one "
            f"stage: plan with stages=1"
        )
    return plan.stages[0]
