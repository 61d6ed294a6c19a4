"""Files of accelerate as recipes: FSDP, DDP and its ParallelismConfig."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autoshard.exports.recipes.deepspeed import recipe_of_deepspeed
from autoshard.exports.recipes.recipe import Recipe

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_KEPT = (False, "false", "SHARD_GRAD_OP", "NO_SHARD", "2", "3")
_WHOLE = ("NO_SHARD", "3")
"""Values of FSDP1's strategy, by name or number."""
_CHANGING = {
    "fsdp_offload_params": "fsdp_offload_params: parameters on the host",
    "fsdp_ignored_modules": "fsdp_ignored_modules",
    "fsdp_min_num_params": "fsdp_min_num_params",
}


def recipe_of_accelerate(settings: Mapping[str, Any]) -> Recipe:
    """Read a file of `accelerate launch --config_file`, or a `ParallelismConfig` as an object.

    Args:
        settings: of the file.
    """
    if str(settings.get("distributed_type")) == "DEEPSPEED":
        return _with_deepspeed(settings)
    fsdp = settings.get("fsdp_config") or {}
    sizes = _parallelism(settings)
    tensor, context = sizes["tp_size"], sizes["cp_size"]
    is_fsdp = str(settings.get("distributed_type", "FSDP" if fsdp else "")) == "FSDP"
    sharded = sizes["dp_shard_size"] if "dp_shard_size" in sizes["given"] else None
    strategy = str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD"))
    frees = fsdp.get("fsdp_reshard_after_forward", True) not in _KEPT and strategy not in _KEPT
    options: dict[str, Any] = {}
    if is_fsdp:
        options["reshard_after_forward"] = "always" if frees else "never"
    recomputed = fsdp.get("fsdp_activation_checkpointing", False)
    options["activation_checkpointing"] = "always" if recomputed else "never"
    return Recipe(
        framework="accelerate",
        pattern="data",
        num_ranks=settings.get("num_processes"),
        replicate=sizes["dp_replicate_size"],
        shard=sharded if is_fsdp else None,
        context=context,
        tensor=tensor,
        zero=3 if is_fsdp and strategy not in _WHOLE else 0,
        options=options,
        accumulation=_accumulation(settings),
        problems=tuple(_problems(settings, sizes, is_fsdp=is_fsdp)),
        unread=tuple(text for name, text in _CHANGING.items() if fsdp.get(name)),
        chosen=tuple(_chosen(sizes)),
    )


def _with_deepspeed(settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a file that runs DeepSpeed, by its own settings of it."""
    given = settings.get("deepspeed_config") or {}
    file = given.get("deepspeed_config_file")
    zero: dict[str, Any] = {"stage": given.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {"device": given.get(f"{name}_device", "none")}
    precision = str(settings.get("mixed_precision"))
    found = recipe_of_deepspeed(
        {
            "zero_optimization": zero,
            "gradient_accumulation_steps": given.get("gradient_accumulation_steps"),
            precision: {"enabled": True},
        }
    )
    unread = [] if file is None else [f"deepspeed_config_file {file}: give that file instead"]
    return replace(
        found,
        framework="accelerate with DeepSpeed",
        num_ranks=settings.get("num_processes"),
        unread=(*found.unread, *unread),
    )


def _accumulation(settings: Mapping[str, Any]) -> int | None:
    number = settings.get("gradient_accumulation_steps")
    return number if isinstance(number, int) else None


def _parallelism(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a ParallelismConfig, and the names of those that are given."""
    given = settings.get("parallelism_config") or {}
    found = {}
    for name in _SIZES:
        value = given.get(f"parallelism_config_{name}", given.get(name, settings.get(name)))
        if value is not None:
            found[name] = int(value)
    return {**dict.fromkeys(_SIZES, 1), **found, "given": set(found)}


def _problems(
    settings: Mapping[str, Any], sizes: Mapping[str, Any], *, is_fsdp: bool
) -> Iterator[str]:
    total = 1
    for name in _SIZES:
        total *= sizes[name]
    processes = settings.get("num_processes")
    if sizes["given"] and processes is not None and total != processes:
        factors = (
            " x ".join(f"{name} {sizes[name]}" for name in _SIZES if sizes[name] > 1) or "all 1"
        )
        yield (
            f"the sizes of parallelism_config, {factors}, make {total} ranks, but num_processes is "
            f"{processes}"
        )
    others = sizes["dp_shard_size"] * sizes["cp_size"]
    if is_fsdp and sizes["given"] and others == 1 and total > 1:
        yield (
            f"FSDP has no ranks to shard over: dp_shard_size and cp_size are 1, and tp_size "
            f"{sizes['tp_size']}, dp_replicate_size {sizes['dp_replicate_size']} take all ranks; "
            f"leave FSDP out, or give dp_shard_size more"
        )
    if sizes["dp_replicate_size"] > 1 and others == 1 and sizes["tp_size"] > 1:
        yield "accelerate does not combine DDP with TP: give dp_shard_size more than 1"
    if sizes["cp_size"] > 1 and not is_fsdp:
        yield "context parallelism of accelerate needs FSDP: set distributed_type FSDP"
    if sizes["cp_size"] > 1 and sizes["sp_size"] > 1:
        yield "cp_size and sp_size are both set; accelerate takes one of them"
    if sizes["sp_size"] > 1:
        yield (
            f"sp_size {sizes['sp_size']} needs DeepSpeed's Ulysses, whose layout cannot be priced"
        )
    version = (settings.get("fsdp_config") or {}).get("fsdp_version", 1)
    if is_fsdp and str(version) == "1" and (sizes["cp_size"] > 1 or sizes["tp_size"] > 1):
        yield "TP and CP of accelerate need FSDP2: set fsdp_version 2"


def _chosen(sizes: Mapping[str, Any]) -> Iterator[str]:
    if sizes["tp_size"] > 1:
        yield "tensor parallelism: priced as the best of torch's styles, not the model's tp_plan"
