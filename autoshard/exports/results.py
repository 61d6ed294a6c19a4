"""The layout that a framework runs after an export, and the share of the plan in it."""

import ast
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping

from autoshard.base.quantities import format_bytes
from autoshard.errors import PlanError
from autoshard.exports.outline import Outline, at_rest
from autoshard.exports.recipes import ProgramFacts, Recipe, RecipeLayout, layout_of
from autoshard.exports.recipes.megatron import recipe_of_script
from autoshard.exports.recipes.settings_files import flattened
from autoshard.exports.recipes.torchtitan import recipe_of_torchtitan
from autoshard.exports.recipes.tp_plan import recipe_of_tp_plan
from autoshard.exports.targets.fsdp2 import placed_by_fsdp2
from autoshard.layouts import Layout
from autoshard.plan.document import Plan
from autoshard.plan.options import ExportRole, PlanOptions
from autoshard.plan.predictions import CollectiveCount, three_digits

__all__ = ["READ_BACK", "result_layout", "result_sentence"]


def _torchtitan(text: str) -> Recipe:
    return recipe_of_torchtitan(flattened(tomllib.loads(text)))


def _tp_plan(text: str) -> Recipe:
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return recipe_of_tp_plan(values)


READ_BACK: Mapping[str, Callable[[str], Recipe]] = {
    "megatron": recipe_of_script,
    "torchtitan": _torchtitan,
    "hf-tp-plan": _tp_plan,
}
"""Readers of exported settings by target."""


def result_layout(plan: Plan, target: str, text: str, facts: ProgramFacts) -> RecipeLayout:
    """The layout that an exported text means to its framework.

    Args:
        plan: the plan, of one stage.
        target: the export target.
        text: the exported text.
        facts: sizes of its program.

    Raises:
        PlanError: the framework refuses such settings, the target leaves ranks without work of
            their own, or is a table.
        OptionError: the text means sizes that do not fit.
    """
    outline = Outline(plan)
    if target in READ_BACK:
        recipe = READ_BACK[target](text)
        if recipe.problems:
            raise PlanError("; ".join(recipe.problems))
        return layout_of(recipe, plan.mesh.num_devices, facts)
    if target == "accelerate":
        return _of_accelerate(outline)
    if target in ("fsdp2", "parallelize-module"):
        return _of_code(outline, target)
    raise PlanError(f"{target} is a table of the plan, which no framework reads")


def _of_accelerate(outline: Outline) -> RecipeLayout:
    """FSDP2 or DDP over all axes, as the settings for accelerate say."""
    if set(outline.active) - set(outline.data_axes):
        raise PlanError("accelerate leaves ranks of other axes than the data-parallel ones out")
    shards, replicas = outline.degree("shard"), outline.degree("replicate")
    again = any(p.name in outline.regathered for p in outline.stage.parameters)
    options = PlanOptions(
        algo="ddp" if shards == 1 else "hsdp" if replicas > 1 else "fsdp2",
        reshard_after_forward="always" if again else "never",
        activation_checkpointing="always" if outline.stage.checkpoints else "never",
    )
    return RecipeLayout(_axes(outline), options, ())


def _of_code(outline: Outline, target: str) -> RecipeLayout:
    """FSDP2 on the data-parallel axes, and layers sharded over another one, as the code places."""
    tensor = outline.tensor_axis if target == "parallelize-module" else None
    idle = set(outline.active) - {*outline.data_axes, tensor}
    if idle:
        raise PlanError(f"ranks of {outline.named(sorted(idle))} repeat each other's work")
    placed = {
        p.name: placed_by_fsdp2(outline, p, tensor) if outline.data_axes else at_rest(p.layout)
        for p in outline.parameters
    }
    shard = (
        outline.shard_axis
        if outline.shard_axis is not None
        else max(outline.data_axes, default=None)
    )
    roles: list[ExportRole] = [
        "tensor" if axis == tensor else "shard" if axis == shard else "replicate"
        for axis in outline.active
    ]
    options = PlanOptions(
        exportable_to=target,
        export_roles=roles,
        pins={"parameters": {name: _pin(layout) for name, layout in placed.items()}},
        activation_checkpointing="never",
    )
    return RecipeLayout(_axes(outline), options, ())


def _pin(layout: Layout) -> str:
    return f"{layout};*" if ";" not in str(layout) else str(layout)


def _axes(outline: Outline) -> tuple[tuple[str, int], ...]:
    return tuple(outline.stage.axes)


def result_sentence(plan: Plan, result: Plan) -> str:
    """Cost of the result of an export, and the number of the plan's collectives in it."""
    if plan.costs is None or result.costs is None or result.memory is None or plan.memory is None:
        return f"Its own result has no price: {result.reason}."
    same = same_collectives(plan, result)
    return (
        f"As the framework runs it: {three_digits(result.costs.total)}, the plan "
        f"{three_digits(plan.costs.total)}; a peak of {format_bytes(result.memory.peak)}, the plan "
        f"{format_bytes(plan.memory.peak)}; {int(100 * same + 1e-9)} % of collectives the same."
    )


def same_collectives(plan: Plan, result: Plan) -> float:
    """Share of the collectives that a plan and the result of its export have in common.

    Collectives are the same if kind, direction and number of ranks are. The share is of those of
    the plan or of the result, whichever are more.
    """
    before, after = (_counted(one.collectives, one) for one in (plan, result))
    most = max(before.total(), after.total())
    return (before & after).total() / most if most else 1.0


def _counted(collectives: tuple[CollectiveCount, ...], plan: Plan) -> Counter[tuple[str, str, int]]:
    """Number of collectives by kind, direction and ranks of a group."""
    sizes = {axis.name: axis.size for axis in plan.mesh.axes}
    counted: Counter[tuple[str, str, int]] = Counter()
    for one in collectives:
        ranks = 1
        for name in one.axis.split("+"):
            ranks *= sizes.get(name, 1)
        counted[one.kind, one.direction, ranks] += one.count
    return counted
