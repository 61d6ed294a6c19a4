"""Reasons why a recipe cannot run a program on a cluster, by arithmetic, before anything starts."""

from collections.abc import Iterator

from autoshard.base.quantities import format_bytes
from autoshard.exports.recipes.facts import ProgramFacts
from autoshard.exports.recipes.recipe import Recipe
from autoshard.mesh import Topology

_STATE_BYTES = {"adamw": 2, "adam": 2, "sgd": 0}
"""Float32 numbers of the optimizer's state of a parameter."""
_FLOAT32 = 4


def recipe_problems(
    recipe: Recipe, num_ranks: int, topology: Topology, facts: ProgramFacts
) -> tuple[str, ...]:
    """The reasons why a recipe cannot run, each with the sizes that do not fit; none if it can.

    Args:
        recipe: the recipe.
        num_ranks: number of devices.
        topology: the devices and their links.
        facts: sizes of the program.
    """
    recipe = recipe.on(num_ranks)
    found = [*recipe.problems, *_of_ranks(recipe, num_ranks)]
    if num_ranks % recipe.model_ranks == 0:
        found += _of_batch(recipe, num_ranks, facts)
    found += [*_of_layers(recipe, facts), *_of_experts(recipe, topology, facts)]
    if not found:
        found += _of_memory(recipe, num_ranks, topology, facts)
    return tuple(found)


def _of_ranks(recipe: Recipe, num_ranks: int) -> Iterator[str]:
    if recipe.num_ranks is not None and recipe.num_ranks != num_ranks:
        yield f"the recipe is for {recipe.num_ranks} ranks, but there are {num_ranks} devices"
    degrees = f"PP {recipe.pipeline} x CP {recipe.context} x TP {recipe.tensor}"
    if num_ranks % recipe.model_ranks:
        yield f"{degrees} = {recipe.model_ranks} ranks do not divide {num_ranks} devices"
        return
    data = num_ranks // recipe.model_ranks
    of_stage = recipe.pipeline * recipe.expert_ranks
    if recipe.experts > 1 and recipe.pattern == "megatron" and num_ranks % of_stage:
        inside = recipe.tensor if recipe.expert_tensor is None else recipe.expert_tensor
        yield (
            f"PP {recipe.pipeline} x max(TP x CP = {recipe.tensor * recipe.context}, EP x ETP = "
            f"{recipe.experts} x {inside} = {recipe.expert_ranks}) ranks do not divide {num_ranks} "
            f"devices"
        )
    replicate, shard = recipe.replicate, recipe.shard
    if shard is not None and replicate is not None and replicate * shard != data:
        yield (
            f"replicas {replicate} x shards {shard} x {degrees} = "
            f"{replicate * shard * recipe.model_ranks} ranks, but there are {num_ranks} devices"
        )
    elif data % (replicate or shard or 1):
        yield f"groups of {replicate or shard} do not divide {data} data-parallel ranks"


def _of_batch(recipe: Recipe, num_ranks: int, facts: ProgramFacts) -> Iterator[str]:
    data = recipe.data_ranks(num_ranks)
    micro, total = recipe.micro_batch, recipe.global_batch
    number = recipe.accumulation
    if total is not None and micro is not None:
        if total % (micro * data):
            yield (
                f"a batch of {total} sequences does not divide into micro-batches of {micro} on "
                f"{data} data-parallel ranks, {micro * data} together"
            )
            return
        found = total // (micro * data)
        if number is not None and found != number:
            yield (
                f"a batch of {total} is not micro-batches of {micro} x {number} accumulated x "
                f"{data} data-parallel ranks = {micro * number * data}"
            )
        number = found
    elif total is not None and total % (data * (number or 1)):
        yield f"a batch of {total} sequences does not divide over {data} data-parallel ranks"
    elif total is None and micro is None and facts.batch is not None and facts.batch % data:
        yield f"the batch of {facts.batch} does not divide over {data} data-parallel ranks"
    is_looped = recipe.stages_per_rank > 1 or recipe.layers_per_stage is not None
    if is_looped and number is not None and number % recipe.pipeline:
        yield (
            f"{number} micro-batches of a step do not divide into rounds of {recipe.pipeline}, the "
            f"pipeline ranks, as interleaved 1F1B needs"
        )


def _of_layers(recipe: Recipe, facts: ProgramFacts) -> Iterator[str]:
    tensor, heads, kv_heads = recipe.tensor, facts.heads, facts.kv_heads
    if heads is not None and heads % tensor:
        yield f"TP {tensor} does not divide {heads} heads of attention"
    elif kv_heads is not None and kv_heads % tensor:
        if not recipe.repeats_kv_heads:
            yield (
                f"TP {tensor} does not divide {kv_heads} heads of keys and values, and "
                f"{recipe.framework} does not repeat them: TP is at most {kv_heads}"
            )
        elif tensor % kv_heads:
            yield f"neither of TP {tensor} and {kv_heads} heads of keys divides the other"
    layers = recipe.num_layers or facts.layers
    is_even = recipe.layers_of_stages is None and not (
        recipe.first_layers or recipe.last_layers or recipe.counts_embedding or recipe.counts_loss
    )
    stages = recipe.pipeline * recipe.stages_per_rank
    if layers is not None and stages > 1 and is_even and layers % stages:
        yield f"{layers} layers do not divide into {stages} pipeline stages"
    if recipe.num_layers and facts.layers and recipe.num_layers != facts.layers:
        yield f"the recipe has {recipe.num_layers} layers, but the model {facts.layers}"
    sequence = recipe.seq_length or facts.sequence
    if sequence is None:
        return
    if recipe.sequence_parallel and tensor > 1 and sequence % tensor:
        yield f"TP {tensor} with sequence parallelism does not divide {sequence} tokens"
    if recipe.context > 1 and sequence % (2 * recipe.context):
        yield (
            f"context parallelism gives each rank two parts of the sequence, and {sequence} tokens "
            f"do not divide into 2 x CP {recipe.context}"
        )


def _of_experts(recipe: Recipe, topology: Topology, facts: ProgramFacts) -> Iterator[str]:
    if recipe.experts == 1:
        return
    if facts.experts is None:
        yield f"EP {recipe.experts}, but the model has no experts"
    elif facts.experts % recipe.experts:
        yield f"EP {recipe.experts} does not divide {facts.experts} experts"
    domain = topology.levels[0].size
    if recipe.experts_in_node and domain is not None and recipe.expert_ranks > domain:
        yield (
            f"EP {recipe.experts} needs {recipe.expert_ranks} ranks in one NVLink domain, as "
            f"HybridEP exchanges rows there, but a domain has {domain} devices: EP is at most "
            f"{domain * recipe.experts // recipe.expert_ranks}"
        )


def _of_memory(
    recipe: Recipe, num_ranks: int, topology: Topology, facts: ProgramFacts
) -> Iterator[str]:
    """The least that every device stores: parameters, gradients and optimizer state.

    All parameters count as if layers, stages and experts divided them evenly; activations are left
    out, so that what does not fit here does not fit at all.
    """
    data = recipe.data_ranks(num_ranks)
    sharing = recipe.pipeline * recipe.tensor * recipe.expert_ranks
    full = data * recipe.context // recipe.replicas(num_ranks)
    parts = {"parameters": facts.stored_bytes, "gradients": facts.stored_bytes}
    state = _STATE_BYTES.get(str(recipe.options.get("optimizer", "adamw")), 0)
    master = bool(recipe.options.get("master_weights"))
    width = _FLOAT32 if master else facts.stored_bytes / max(facts.parameters, 1)
    parts["the optimizer's state"] = int(facts.parameters * width * (state + master))
    divisors = {
        "parameters": full if recipe.zero >= 3 else 1,  # noqa: PLR2004  stages of ZeRO
        "gradients": full if recipe.zero >= 2 else 1,  # noqa: PLR2004
        "the optimizer's state": full if recipe.zero >= 1 else 1,
    }
    least = {name: size // (sharing * divisors[name]) for name, size in parts.items()}
    total, memory = sum(least.values()), topology.device.memory
    if total > memory:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in least.items())
        yield (
            f"each device stores at least {format_bytes(total)} of its {format_bytes(memory)} "
            f"before any activation: {listed}"
        )
