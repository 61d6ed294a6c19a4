"""The mesh and the options of planning that a recipe means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.errors import OptionError
from autoshard.exports.recipes.facts import ProgramFacts
from autoshard.exports.recipes.recipe import Recipe, divided
from autoshard.plan.options import ExportRole, PlanOptions

_STYLES: Mapping[str, str] = {
    "colwise": "S(0)",
    "colwise_rep": "S(0)",
    "colwise_gather_output": "S(0)",
    "rowwise": "S(1)",
    "rowwise_split_input": "S(1)",
    "rowwise_rep": "S(1)",
    "embedding_rowwise": "S(0)",
    "embedding_colwise": "S(1)",
    "replicate": "I",
}
"""Layout of a weight over the tensor-parallel axis, by its style in a tp_plan."""

_SUMMED = ("rowwise", "rowwise_split_input", "rowwise_rep")
_TORCHTITAN: Mapping[str, ExportRole] = {
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "cp": "context",
    "tp": "tensor",
}


@dataclass(frozen=True)
class RecipeLayout:
    """The layout of a recipe.

    Attributes:
        axes: name and size of each axis of the mesh, outermost first.
        options: options of planning. The program to plan is that of a micro-batch of all
            data-parallel ranks.
        chosen: settings that options cannot fix, and what a plan has instead.
    """

    axes: tuple[tuple[str, int], ...]
    options: PlanOptions
    chosen: tuple[str, ...]


def layout_of(recipe: Recipe, num_ranks: int, facts: ProgramFacts | None = None) -> RecipeLayout:
    """The mesh and the options of a recipe.

    Args:
        recipe: the recipe.
        num_ranks: number of all ranks.
        facts: sizes of the program; without them, pipeline stages of equal numbers of layers are
            known only if the recipe states the number of layers.

    Raises:
        OptionError: sizes do not divide each other, or the program is not that of a micro-batch.
    """
    recipe = recipe.on(num_ranks)
    degrees = _degrees(recipe, num_ranks)
    axes = tuple((name, size) for name, size in degrees.items() if size > 1) or (("dp", 1),)
    options = {
        **recipe.options,
        **_pattern_options(recipe, degrees),
        **_pipeline_options(recipe, facts),
        **_micro_batch_options(recipe, num_ranks, facts),
    }
    if facts is not None and facts.has_policy:
        options |= {"master_weights": False, "accumulation_dtype": None}
    chosen = [*recipe.chosen, *(f"{name}: it is not modelled" for name in recipe.unread)]
    if recipe.pattern == "torchtitan" and recipe.experts > 1:
        chosen.append("experts of torchtitan: priced in the layout of Megatron-LM's experts")
    return RecipeLayout(axes, PlanOptions(**options), tuple(chosen))


def program_batch(recipe: Recipe, num_ranks: int) -> int | None:
    """Sequences of the program to plan: those of a micro-batch of all data-parallel ranks.

    None if the recipe does not say.

    Raises:
        OptionError: sizes do not divide each other.
    """
    data = recipe.on(num_ranks).data_ranks(num_ranks)
    if recipe.micro_batch is not None:
        return recipe.micro_batch * data
    if recipe.global_batch is None:
        return None
    number = recipe.accumulation or 1
    return divided(recipe.global_batch, number, "sequences", "the micro-batches of a step")


def _degrees(recipe: Recipe, num_ranks: int) -> dict[str, int]:
    """Size of each axis by name, outermost first."""
    data = recipe.data_ranks(num_ranks)
    pipeline, context, tensor = recipe.pipeline, recipe.context, recipe.tensor
    if recipe.pattern == "layers":
        return {"dp": data, "tp": tensor}
    if recipe.pattern == "megatron" or recipe.experts > 1:
        experts = (
            divided(recipe.expert_ranks, tensor, "ranks of experts", "the tensor-parallel ranks")
            if recipe.experts > 1
            else 1
        )
        left = divided(data, experts, "data-parallel ranks", "those that share experts")
        return {"pp": pipeline, "dp": left, "ep": experts, "cp": context, "tp": tensor}
    replicate = recipe.replicas(num_ranks)
    shard = recipe.shard or divided(data, replicate, "data-parallel ranks", "the replicas")
    if shard * replicate != data:
        raise OptionError(
            f"{recipe.framework}: {replicate} replicas x {shard} shards are not the {data} "
            f"data-parallel ranks of {num_ranks} ranks"
        )
    if recipe.pattern == "torchtitan":
        names = ("dp_replicate", "dp_shard")
    elif replicate > 1 and shard > 1:
        names = ("replicate", "shard")
    else:
        return {"pp": pipeline, "dp": data, "cp": context, "tp": tensor}
    return {"pp": pipeline, names[0]: replicate, names[1]: shard, "cp": context, "tp": tensor}


def _pattern_options(recipe: Recipe, degrees: Mapping[str, int]) -> dict[str, Any]:
    match recipe.pattern:
        case "layers":
            return {"exportable_to": "hf-tp-plan", "pins": {"parameters": _pins(recipe.tp_plan)}}
        case "data":
            return _data_options(recipe, degrees)
        case "torchtitan" if recipe.experts == 1:
            roles = [role for name, role in _TORCHTITAN.items() if degrees.get(name, 1) > 1]
            return {"exportable_to": "torchtitan", "export_roles": roles or None}
        case _:
            sequences = recipe.sequence_parallel or recipe.pattern == "torchtitan"
            return {
                "algo": "megatron-sp" if sequences else "megatron",
                "distributed_optimizer": recipe.zero > 0,
                "regather_activations": sequences or recipe.context > 1,
            }


def _data_options(recipe: Recipe, degrees: Mapping[str, int]) -> dict[str, Any]:
    """Options of a framework that shards any model over data-parallel ranks."""
    if recipe.context > 1 or recipe.tensor > 1:
        known = {**_TORCHTITAN, "dp": "shard", "replicate": "replicate", "shard": "shard"}
        roles = [known[name] for name, size in degrees.items() if size > 1 and name in known]
        target = "torchtitan" if recipe.context > 1 else "parallelize-module"
        return {"exportable_to": target, "export_roles": roles}
    if recipe.zero < 3:  # noqa: PLR2004  ZeRO-3 shards parameters
        return {"algo": "ddp", "distributed_optimizer": recipe.zero > 0}
    return {"algo": "hsdp" if degrees.get("shard", 1) > 1 else "fsdp2"}


def _pins(tp_plan: Mapping[str, str]) -> dict[str, str]:
    """The layout of each parameter over the tensor-parallel axis."""
    pins = {}
    for name, style in tp_plan.items():
        if style not in _STYLES:
            raise OptionError(
                f"tp_plan: {name!r} has the style {style!r}; read are {', '.join(_STYLES)}"
            )
        pins[f"{name}.weight"] = _STYLES[style]
    return pins


def _pipeline_options(recipe: Recipe, facts: ProgramFacts | None) -> dict[str, Any]:
    layers = recipe.num_layers or (None if facts is None else facts.layers)
    per_rank = recipe.stages_per_rank
    if recipe.layers_per_stage is not None:
        if layers is None:
            raise OptionError(
                "the layers of a virtual stage are given: that needs --num-layers, or the program"
            )
        in_rank = divided(layers, recipe.pipeline, "layers", "the pipeline ranks")
        per_rank = divided(
            in_rank, recipe.layers_per_stage, "layers of a rank", "those of a virtual stage"
        )
    stages = recipe.pipeline * per_rank
    if stages == 1:
        return {}
    balance = recipe.layers_of_stages
    if balance is None and layers is not None:
        balance = _balance(recipe, layers, per_rank)
    return {
        "schedule": "1F1B" if per_rank == 1 else "Interleaved1F1B",
        **{k: v for k, v in recipe.options.items() if k == "schedule"},
        "stages": stages,
        "stages_per_rank": per_rank,
        "balance": balance,
    }


def _balance(recipe: Recipe, layers: int, per_rank: int) -> tuple[int, ...]:
    """Numbers of layers of all stages."""
    ranks = recipe.pipeline
    embedding, loss = int(recipe.counts_embedding), int(recipe.counts_loss)
    of_ranks: list[int | None] = [None] * ranks
    if recipe.first_layers is not None:
        of_ranks[0] = recipe.first_layers
    if recipe.last_layers is not None:
        of_ranks[-1] = recipe.last_layers
    left = layers + embedding + loss - sum(number or 0 for number in of_ranks)
    open_ranks = of_ranks.count(None)
    each = divided(left, open_ranks, "layers", "the other pipeline ranks") if open_ranks else 0
    numbers = [each if number is None else number for number in of_ranks]
    stages = [divided(n, per_rank, "layers of a rank", "its stages") for n in numbers] * per_rank
    stages[0] -= embedding
    stages[-1] -= loss
    if sum(stages) != layers or min(stages) < 1:
        raise OptionError(f"{layers} layers cannot be divided into stages of {stages}")
    return tuple(stages)


def _micro_batch_options(
    recipe: Recipe, num_ranks: int, facts: ProgramFacts | None
) -> dict[str, int]:
    """The number of micro-batches, if the recipe says it.

    Raises:
        OptionError: the program is not that of a micro-batch.
    """
    number = recipe.accumulation
    size = program_batch(recipe, num_ranks)
    if recipe.global_batch is not None and size is not None:
        number = divided(recipe.global_batch, size, "sequences", "those of a micro-batch")
    if size is not None and facts is not None and facts.batch not in (None, size):
        steps = "" if number is None else f", {number} times a step"
        raise OptionError(
            f"the recipe runs a program of {size} sequences on all data-parallel ranks{steps}, but "
            f"this one has a batch of {facts.batch}: export the model with a batch of {size}"
        )
    return {} if number is None else {"micro_batches": number}
