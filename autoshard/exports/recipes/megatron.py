"""Arguments of Megatron-LM, and recipes of Megatron-Bridge, as recipes."""

import re
import shlex
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from autoshard.errors import OptionError
from autoshard.exports.recipes.recipe import Recipe

_MATTERS = re.compile(
    r"parallel|recompute|offload|fp8|fp4|moe-|expert|shard|dtype|optimizer|cuda-graph|activation-"
    r"|-fsdp|gradient|reduce-in"
)
"""Names of arguments that may change layout or memory."""
_HARMLESS = re.compile(
    r"^--(moe-(router|aux|z-loss|grouped-gemm|permute|token-drop|pad)|overlap-|no-gradient|"
    r"optimizer-cpu-(?!offload)|disable-|gradient-accumulation-fusion|"
    r"moe-token-dispatcher|num-experts$|moe-layer-freq|moe-ffn|moe-shared-expert-(inter|overlap))"
)


def recipe_of_arguments(arguments: str | Sequence[str]) -> Recipe:
    """Read the arguments of Megatron-LM that set parallelism, batch sizes and recomputation.

    Args:
        arguments: the command line, a script with a Bash array of them, or its parts; arguments of
            model, data and optimizer are ignored.

    Raises:
        OptionError: an argument is malformed, or it sets a kind of parallelism that options do not
            have.
    """
    parts = shlex.split(arguments, comments=True) if isinstance(arguments, str) else list(arguments)
    given, others = _parse([word for part in parts for word in part.split() or [part]])
    return _recipe(given, "Megatron-LM", tuple(_unread(others)))


def recipe_of_script(text: str) -> Recipe:
    """Read a Bash script that runs Megatron-LM, with the variables that it sets to constants.

    Raises:
        OptionError: as `recipe_of_arguments`; also for a variable that is not known.
    """
    values = {found["name"]: found["value"] for found in _ASSIGNED.finditer(text)}
    known = _VARIABLE.sub(lambda m: values.get(m[1] or m[3], m[2] or m[0]), text)
    return recipe_of_arguments(re.sub(r"[()]", " ", known))


_ASSIGNED = re.compile(
    r"^\s*(?:export\s+)?(?P<name>[A-Z_]\w*)=[\"']?(?:\$\{\w+:-)?[\"']?(?P<value>[\w.-]+)",
    re.MULTILINE,
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


def recipe_of_bridge(settings: Mapping[str, Any]) -> Recipe:
    """Read the settings of a recipe of Megatron-Bridge, by dotted name.

    Raises:
        OptionError: a setting is malformed.
    """
    parts: list[str] = []
    others = []
    for place, value in settings.items():
        section, _, name = place.rpartition(".")
        name = _OF_BRIDGE.get(name, name)
        if section not in _SECTIONS or value is None or value is False:
            continue
        if name in (*_SIZES, *_NUMBERS, *_SWITCHES, *_UNSUPPORTED, *_CHOICES):
            flag = f"--{name.replace('_', '-')}"
            parts += [flag] if value is True else [flag, str(value)]
        else:
            others.append(f"--{name.replace('_', '-')}")
    if not str(settings.get("mixed_precision", "bf16_mixed")).startswith("fp32"):
        parts.append("--bf16")
    given, _ = _parse(parts)
    return _recipe(given, "Megatron-Bridge", tuple(_unread(others)))


_FULL = 3
_SECTIONS = ("model", "train", "ddp", "optimizer", "mixed_precision", "comm_overlap", "")
_OF_BRIDGE = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
}
"""Arguments of Megatron-LM that mean settings of Megatron-Bridge with other names."""


def _recipe(given: Namespace, framework: str, unread: tuple[str, ...]) -> Recipe:
    for name in _UNSUPPORTED:
        if getattr(given, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} cannot be read: give `cuts` instead")
    recomputed = {None: "never", "selective": "auto", "full": "always"}
    return Recipe(
        framework=framework,
        pattern="megatron",
        num_ranks=given.world_size,
        pipeline=given.pipeline_model_parallel_size,
        context=given.context_parallel_size,
        tensor=given.tensor_model_parallel_size,
        experts=given.expert_model_parallel_size,
        expert_tensor=given.expert_tensor_parallel_size,
        zero=_zero(given),
        sequence_parallel=given.sequence_parallel,
        repeats_kv_heads=True,
        stages_per_rank=given.num_virtual_stages_per_pipeline_rank or 1,
        layers_per_stage=given.num_layers_per_virtual_pipeline_stage,
        num_layers=given.num_layers,
        first_layers=given.decoder_first_pipeline_num_layers,
        last_layers=given.decoder_last_pipeline_num_layers,
        counts_embedding=given.account_for_embedding_in_pipeline_split,
        counts_loss=given.account_for_loss_in_pipeline_split,
        micro_batch=given.micro_batch_size if given.global_batch_size else None,
        global_batch=given.global_batch_size if given.micro_batch_size else None,
        seq_length=given.seq_length,
        experts_in_node=given.moe_flex_dispatcher_backend == "hybridep",
        options={
            "activation_checkpointing": recomputed[given.recompute_granularity],
            "reshard_after_forward": "always" if _zero(given) == _FULL else "auto",
            "master_weights": given.bf16 or given.fp16,
            "accumulation_dtype": "float32"
            if given.bf16 or given.accumulate_allreduce_grads_in_fp32
            else None,
            "optimizer": {"adam": "adamw", "sgd": "sgd"}[given.optimizer],
        },
        unread=unread,
        chosen=tuple(_chosen(given)),
    )


def _zero(given: Namespace) -> int:
    if not given.use_megatron_fsdp:
        return int(given.use_distributed_optimizer)
    return _STRATEGIES[given.data_parallel_sharding_strategy]


def _unread(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments among others that may change layout or memory."""
    for argument in dict.fromkeys(part.partition("=")[0] for part in arguments):
        if (
            argument.startswith("--")
            and _MATTERS.search(argument)
            and not _HARMLESS.match(argument)
        ):
            yield argument


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a malformed argument."""
        raise OptionError(f"arguments of Megatron-LM: {message}")


_UNSUPPORTED = ("pipeline_model_parallel_layout", "pipeline_model_parallel_split_rank")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_NUMBERS = (
    "expert_tensor_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "num_layers",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "world_size",
)
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_CHOICES: Mapping[str, dict[str, Any]] = {
    "recompute_granularity": {"choices": ("full", "selective")},
    "optimizer": {"choices": ("adam", "sgd"), "default": "adam"},
    "moe_flex_dispatcher_backend": {},
    "data_parallel_sharding_strategy": {
        "choices": tuple(_STRATEGIES),
        "default": "optim_grads_params",
    },
}
_SWITCHES = (
    "sequence_parallel",
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "accumulate_allreduce_grads_in_fp32",
    "bf16",
    "fp16",
)


def _parse(parts: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The arguments that are read, and all others."""
    parser = _Parser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for names, settings in (
        (_SIZES, {"type": int, "default": 1}),
        (_NUMBERS, {"type": int}),
        (_SWITCHES, {"action": "store_true"}),
        (_UNSUPPORTED, {}),
    ):
        for name in names:
            flag: Any = parser.add_argument
            flag(f"--{name.replace('_', '-')}", **settings)
    for name, settings in _CHOICES.items():
        flag = parser.add_argument
        flag(f"--{name.replace('_', '-')}", **settings)
    try:
        given, others = parser.parse_known_args(parts)
    except ArgumentError as error:
        raise OptionError(f"arguments of Megatron-LM: {error}") from None
    for name in (*_SIZES, *_NUMBERS):
        number = getattr(given, name)
        if number is not None and number < 1:
            raise OptionError(f"--{name.replace('_', '-')} is {number}, which is not positive")
    return given, others


def _chosen(given: Namespace) -> Iterator[str]:
    if given.recompute_granularity == "selective":
        yield "selective recomputation: blocks are recomputed where memory needs it"
