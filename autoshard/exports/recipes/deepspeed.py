"""Configurations of DeepSpeed as recipes."""

from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.errors import OptionError
from autoshard.exports.recipes.recipe import Recipe

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_STAGES = range(4)
_FULL = 3
_THRESHOLD = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold."""


def recipe_of_deepspeed(settings: Mapping[str, Any]) -> Recipe:
    """Read a configuration of DeepSpeed.

    Raises:
        OptionError: the stage of ZeRO does not exist.
    """
    zero = settings.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in _STAGES:
        raise OptionError(f"DeepSpeed: zero_optimization.stage is {stage!r}, not 0, 1, 2 or 3")
    total, micro, steps = (settings.get(name) for name in _BATCH)
    shards = zero.get("mics_shard_size", -1)
    tensor = (settings.get("tensor_parallel") or {}).get("autotp_size") or 1
    is_narrow = any((settings.get(name) or {}).get("enabled") is True for name in ("bf16", "fp16"))
    options: dict[str, Any] = {
        "master_weights": is_narrow,
        "clip_gradients": _is_number(settings.get("gradient_clipping")),
    }
    if stage == _FULL:
        options["reshard_after_forward"] = "always"
    return Recipe(
        framework="DeepSpeed",
        pattern="data",
        zero=stage,
        replicate=None if shards > 0 else 1,
        shard=shards if shards > 0 else None,
        tensor=tensor,
        global_batch=total if _is_number(total) else None,
        micro_batch=micro if _is_number(micro) else None,
        accumulation=steps if _is_number(steps) else None,
        options=options,
        problems=tuple(_problems(settings, zero)),
        unread=tuple(_unread(settings, zero)),
        chosen=tuple(_chosen(settings, zero)),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _problems(settings: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[str]:
    both = [n for n in ("bf16", "fp16") if (settings.get(n) or {}).get("enabled") is True]
    if len(both) > 1:
        yield "bf16 and fp16 are both enabled; DeepSpeed takes one of them"
    if zero.get("offload_param") and zero.get("stage") != _FULL:
        device = (zero["offload_param"] or {}).get("device", "none")
        if device != "none":
            yield f"offload_param needs ZeRO stage 3, but the stage is {zero.get('stage', 0)}"
    if (settings.get("pipeline") or {}).get("stages", "auto") not in ("auto", 1) and zero.get(
        "stage", 0
    ) > 1:
        yield f"DeepSpeed's pipelines run with ZeRO stages 0 and 1, not {zero.get('stage')}"


def _unread(settings: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[str]:
    for name in ("offload_optimizer", "offload_param"):
        device = (zero.get(name) or {}).get("device", "none")
        if device not in ("none", None):
            yield f"zero_optimization.{name} to {device}"
    for name in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(name, 1) not in (1, False, None):
            yield f"zero_optimization.{name}"
    for name in ("activation_checkpointing", "sequence_parallel_size", "compression_training"):
        if settings.get(name):
            yield name


def _chosen(settings: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[str]:
    threshold = zero.get("stage3_param_persistence_threshold", _THRESHOLD)
    if zero.get("stage") == _FULL and threshold:
        yield f"parameters of fewer than {threshold} elements: here they are sharded too"
    left = [name for name in _BATCH if settings.get(name) == "auto"]
    if left:
        yield f"{', '.join(left)} are auto: the batch of the program counts"
