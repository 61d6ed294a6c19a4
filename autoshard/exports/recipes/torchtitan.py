"""Settings of torchtitan as recipes: the TOML of 0.2, and what a function of its registry sets."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.errors import OptionError
from autoshard.exports.recipes.recipe import Recipe

_DEGREES = {
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": -1,
    "tensor_parallel_degree": 1,
    "context_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "expert_tensor_parallel_degree": 1,
}
"""Degrees of parallelism with torchtitan's defaults."""
_READ = (
    *_DEGREES,
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_layers_per_stage",
    "module_fqns_per_model_part",
    "fsdp_reshard_after_forward",
)
_HARMLESS = (
    "enable_async_tensor_parallel",
    "context_parallel_rotate_method",
    "enable_loss_parallel",
)
_SECTIONS = ("parallelism", "activation_checkpoint", "training", "quantize", "float8", "mx")
_CHANGING = re.compile(r"offload|dtype$|disable_loss_parallel|float8|mx|compile_|converters")
_RECOMPUTED = {"none": "never", "selective": "auto", "full": "always"}
_LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
_LAYER = re.compile(r"(?:.*\.)?\d+")


def recipe_of_torchtitan(settings: Mapping[str, Any]) -> Recipe:
    """Read settings of torchtitan.

    Args:
        settings: by dotted name, such as `parallelism.tensor_parallel_degree`.

    Raises:
        OptionError: a setting is malformed.
    """
    degree = {name: _number(settings, name, default) for name, default in _DEGREES.items()}
    shard = degree["data_parallel_shard_degree"]
    pipeline = degree["pipeline_parallel_degree"]
    replicate, tensor = degree["data_parallel_replicate_degree"], degree["tensor_parallel_degree"]
    local = settings.get("training.local_batch_size", settings.get("training.batch_size"))
    micro = settings.get("parallelism.pipeline_parallel_microbatch_size", 1)
    mode = settings.get("activation_checkpoint.mode", "selective")
    if mode not in _RECOMPUTED:
        raise OptionError(f"torchtitan: activation_checkpoint.mode is {mode!r}, which is not read")
    resharding = settings.get("parallelism.fsdp_reshard_after_forward", "default")
    always = resharding == "always" or (resharding == "default" and pipeline == 1)
    total = settings.get("training.global_batch_size")
    accumulation = None
    if local is not None and pipeline > 1:
        if local % micro:
            raise OptionError(f"torchtitan: {local} local sequences do not divide by {micro}")
        accumulation = local // micro
    return Recipe(
        framework="torchtitan",
        pattern="torchtitan",
        pipeline=pipeline,
        replicate=replicate,
        shard=None if shard < 0 else shard,
        context=degree["context_parallel_degree"],
        tensor=tensor,
        experts=degree["expert_parallel_degree"],
        expert_tensor=degree["expert_tensor_parallel_degree"],
        zero=3,
        sequence_parallel=tensor > 1,
        micro_batch=(micro if pipeline > 1 else local) if local is not None else None,
        global_batch=total if total and total > 0 and local is not None else None,
        accumulation=accumulation,
        seq_length=settings.get("training.seq_len"),
        **_stages(settings, pipeline),
        options={
            "activation_checkpointing": _RECOMPUTED[mode],
            "reshard_after_forward": "always" if always else "never",
            "clip_gradients": True,
            **_schedule(settings, pipeline),
        },
        problems=tuple(_problems(replicate, shard, tensor, degree["context_parallel_degree"])),
        unread=tuple(_unread(settings)),
        chosen=("selective activation checkpointing: blocks are recomputed where memory needs it",)
        if mode == "selective"
        else (),
    )


def _number(settings: Mapping[str, Any], name: str, default: int) -> int:
    found = settings.get(f"parallelism.{name}", default)
    if not isinstance(found, int) or (found < 1 and found != default):
        raise OptionError(f"torchtitan: {name} is {found!r}, not a positive number")
    return found


def _problems(replicate: int, shard: int, tensor: int, context: int) -> Iterator[str]:
    if replicate > 1 and shard == 1 and context == 1 and tensor > 1:
        yield (
            f"torchtitan does not combine DDP with TP: data_parallel_shard_degree is 1 with "
            f"{replicate} replicas and TP {tensor}; shard parameters over some of them"
        )


def _stages(settings: Mapping[str, Any], pipeline: int) -> dict[str, Any]:
    """Stages of a rank, and layers of each stage."""
    if pipeline == 1:
        return {}
    modules = settings.get("parallelism.module_fqns_per_model_part")
    if modules:
        layers = tuple(sum(bool(_LAYER.fullmatch(name)) for name in part) for part in modules)
        return {"stages_per_rank": len(modules) // pipeline, "layers_of_stages": layers}
    per_stage = settings.get("parallelism.pipeline_parallel_layers_per_stage")
    if per_stage:
        return {"layers_per_stage": per_stage}
    looped = settings.get("parallelism.pipeline_parallel_schedule") in _LOOPED
    return {"stages_per_rank": 2 if looped else 1}


def _schedule(settings: Mapping[str, Any], pipeline: int) -> dict[str, str]:
    name = settings.get("parallelism.pipeline_parallel_schedule")
    return {"schedule": str(name)} if name and pipeline > 1 else {}


def _unread(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings that change layout or memory and are not read."""
    for place, value in settings.items():
        section, _, name = place.partition(".")
        if not value or section not in _SECTIONS or name in (*_READ, *_HARMLESS):
            continue
        if section == "parallelism" or _CHANGING.search(place):
            if section == "training" and name.endswith("dtype"):
                continue  # that of the program counts
            yield place
