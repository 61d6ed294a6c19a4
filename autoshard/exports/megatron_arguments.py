"""Reading the arguments of Megatron-LM: parallelism as a mesh and options of planning."""

import shlex
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from autoshard.errors import OptionError
from autoshard.plan.options import PlanOptions


@dataclass(frozen=True)
class MegatronLayout:
    """Parallelism that arguments of Megatron-LM ask for.

    Attributes:
        axes: name and size of each axis of the mesh, outermost first.
        options: options of planning. The program to plan is that of a micro-batch of all
            data-parallel ranks.
        chosen: settings of Megatron-LM that options cannot fix, and what a plan has instead.
    """

    axes: tuple[tuple[str, int], ...]
    options: PlanOptions
    chosen: tuple[str, ...]


def read_megatron(arguments: str | Sequence[str], *, num_ranks: int) -> MegatronLayout:
    """Read the arguments of Megatron-LM that set parallelism, batch sizes and recomputation.

    Args:
        arguments: the command line, or its parts; arguments of model, data and optimizer are
            ignored.
        num_ranks: number of all ranks.

    Raises:
        OptionError: sizes do not divide each other, an argument is malformed, or it sets a kind of
            parallelism that options do not have.

    Example:
        >>> found = read_megatron("--tensor-model-parallel-size 8 ...", num_ranks=64)
        >>> names, sizes = zip(*found.axes)
        >>> plan = make_plan(graph, make_mesh(sizes, axes=names), found.options)
    """
    parts = shlex.split(arguments) if isinstance(arguments, str) else list(arguments)
    given = _parse(parts)
    for name in _UNSUPPORTED:
        if getattr(given, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} cannot be read: give `cuts` instead")
    model_parallel = (
        given.pipeline_model_parallel_size
        * given.context_parallel_size
        * given.tensor_model_parallel_size
    )
    data_parallel = _divided(num_ranks, model_parallel, "ranks", "the model-parallel sizes")
    experts = _expert_ranks(given)
    degrees = {
        "pp": given.pipeline_model_parallel_size,
        "dp": _divided(data_parallel, experts, "data-parallel ranks", "those that share experts"),
        "ep": experts,
        "cp": given.context_parallel_size,
        "tp": given.tensor_model_parallel_size,
    }
    axes = tuple((name, size) for name, size in degrees.items() if size > 1) or (("dp", 1),)
    return MegatronLayout(axes, _options(given, data_parallel), tuple(_chosen(given)))


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
)
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


def _parse(parts: Sequence[str]) -> Namespace:
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
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    try:
        given, _ = parser.parse_known_args(parts)
    except ArgumentError as error:
        raise OptionError(f"arguments of Megatron-LM: {error}") from None
    for name in (*_SIZES, *_NUMBERS):
        number = getattr(given, name)
        if number is not None and number < 1:
            raise OptionError(f"--{name.replace('_', '-')} is {number}, which is not positive")
    return given


def _divided(number: int, divisor: int, what: str, of: str) -> int:
    if number % divisor:
        raise OptionError(f"{number} {what} cannot be divided by {divisor}, {of}")
    return number // divisor


def _options(given: Namespace, data_parallel: int) -> PlanOptions:
    per_rank = _stages_per_rank(given)
    stages = given.pipeline_model_parallel_size * per_rank
    in_pipeline = {
        "stages": stages,
        "stages_per_rank": per_rank,
        "schedule": "1F1B" if per_rank == 1 else "Interleaved1F1B",
        "balance": _balance(given, per_rank),
    }
    recomputed = {None: "never", "selective": "auto", "full": "always"}
    return PlanOptions(
        **{
            **(in_pipeline if stages > 1 else {}),
            **_micro_batches(given, data_parallel),
            "algo": "megatron-sp" if given.sequence_parallel else "megatron",
            "distributed_optimizer": given.use_distributed_optimizer or given.use_megatron_fsdp,
            "activation_checkpointing": recomputed[given.recompute_granularity],
            "regather_activations": given.sequence_parallel or given.context_parallel_size > 1,
            "reshard_after_forward": "always" if given.use_megatron_fsdp else "auto",
            "master_weights": given.bf16 or given.fp16,
            "accumulation_dtype": "float32"
            if given.bf16 or given.accumulate_allreduce_grads_in_fp32
            else None,
            "optimizer": {"adam": "adamw", "sgd": "sgd"}[given.optimizer],
        }
    )


def _expert_ranks(given: Namespace) -> int:
    """Number of data-parallel ranks that share the experts of a layer.

    Without tensor parallelism inside experts, the tensor-parallel ranks share them as well.
    """
    tensor, experts = given.tensor_model_parallel_size, given.expert_model_parallel_size
    inside = given.expert_tensor_parallel_size or tensor
    if experts == 1:
        return 1
    return _divided(experts * inside, tensor, "ranks of experts", "the tensor-parallel ranks")


def _stages_per_rank(given: Namespace) -> int:
    if given.num_virtual_stages_per_pipeline_rank is not None:
        return int(given.num_virtual_stages_per_pipeline_rank)
    if given.num_layers_per_virtual_pipeline_stage is None:
        return 1
    if given.num_layers is None:
        raise OptionError("--num-layers-per-virtual-pipeline-stage needs --num-layers")
    in_rank = _divided(
        given.num_layers, given.pipeline_model_parallel_size, "layers", "the pipeline ranks"
    )
    virtual = given.num_layers_per_virtual_pipeline_stage
    return _divided(in_rank, virtual, "layers of a rank", "those of a virtual stage")


def _balance(given: Namespace, per_rank: int) -> tuple[int, ...] | None:
    """Numbers of layers of all stages; None if the number of layers is unknown."""
    ranks, layers = given.pipeline_model_parallel_size, given.num_layers
    if layers is None:
        return None
    embedding = int(given.account_for_embedding_in_pipeline_split)
    loss = int(given.account_for_loss_in_pipeline_split)
    first, last = given.decoder_first_pipeline_num_layers, given.decoder_last_pipeline_num_layers
    of_ranks: list[int | None] = [None] * ranks
    if first is not None:
        of_ranks[0] = first
    if last is not None:
        of_ranks[-1] = last
    left = layers + embedding + loss - sum(number or 0 for number in of_ranks)
    open_ranks = of_ranks.count(None)
    each = _divided(left, open_ranks, "layers", "the other pipeline ranks") if open_ranks else 0
    numbers = [each if number is None else number for number in of_ranks]
    stages = [_divided(n, per_rank, "layers of a rank", "its stages") for n in numbers] * per_rank
    stages[0] -= embedding
    stages[-1] -= loss
    if sum(stages) != layers or min(stages) < 1:
        raise OptionError(f"{layers} layers cannot be divided into stages of {stages}")
    return tuple(stages)


def _micro_batches(given: Namespace, data_parallel: int) -> dict[str, int]:
    """The option, if both batch sizes are given."""
    if given.global_batch_size is None or given.micro_batch_size is None:
        return {}
    size = given.micro_batch_size * data_parallel
    number = _divided(given.global_batch_size, size, "sequences", "those of a micro-batch")
    return {"micro_batches": number}


def _chosen(given: Namespace) -> Iterator[str]:
    if given.recompute_granularity == "selective":
        yield "selective recomputation: blocks are recomputed where memory needs it"
