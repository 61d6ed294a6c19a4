"""The plan that an exported text means to its framework, made in this process."""

from autoshard.errors import InputError, PlanError
from autoshard.exports import export_plan, program_facts
from autoshard.exports.results import result_layout
from autoshard.graph import graph_from_json
from autoshard.mesh import Axis, Mesh
from autoshard.plan import Plan
from autoshard.plan.options.restrictions import without_restrictions
from autoshard.planner import make_plan

_SECONDS = 30.0
"""Time limit of the plan of a result."""
_OF_LAYOUT = (
    *("algo", "distributed_optimizer", "exportable_to", "export_roles", "pins", "unsharded_below"),
    *("reshard_after_forward", "regather_activations", "activation_checkpointing"),
    *("master_weights", "accumulation_dtype"),
)
"""Options that an export decides; the others are the plan's."""


def export_result(plan: Plan, target: str) -> Plan:
    """The plan that the text of an export means: what the framework runs, with its price.

    Args:
        plan: a plan of one stage.
        target: a target whose text has a meaning of its own, not a table.

    Returns:
        a plan, or a document without one that says why.

    Raises:
        PlanError: the plan is a pipeline, the target is a table, or its text cannot be priced.
    """
    if plan.pipeline is not None:
        raise PlanError("the document of a pipeline has the programs of stages, not the whole one")
    graph = graph_from_json(plan.stages[0].program)
    text = export_plan(plan, target, min_expressed=0)
    try:
        found = result_layout(plan, target, text, program_facts(graph))
        given = {k: v for k, v in found.options.given.items() if k in _OF_LAYOUT}
        limit = min(plan.options.solver.time_limit, _SECONDS)
        options = without_restrictions(plan.options).with_values(
            **given, stages=1, comparisons=False, time_limit=limit
        )
        mesh = Mesh(tuple(Axis(name, size) for name, size in found.axes), plan.mesh.topology)
        return make_plan(graph, mesh, options)
    except InputError as error:
        raise PlanError(f"the result of an export to {target} has no price: {error}") from None
