"""Export to Megatron-LM: a Bash array of command-line arguments."""

from collections.abc import Iterator
from math import prod

from autoshard.plan.exports.outline import Outline, Role, comment, folded, not_expressed
from autoshard.plan.exports.target import export_target

_FULLY_SHARDED = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy optim_grads_params",
    "--use-distributed-optimizer",
    "--no-gradient-accumulation-fusion",
    "--ckpt-format fsdp_dtensor",
)

_RECOMPUTED = (
    "--recompute-granularity full",
    "--recompute-method uniform",
    "--recompute-num-layers 1",
)

_ORDER: tuple[Role, ...] = ("replicate", "shard", "context", "tensor")
"""Roles of axes in Megatron-LM's order, outermost first."""

_HIDDEN_STATES = 3
"""Number of dims of batch, sequence and features."""


@export_target(
    "megatron",
    media_type="text/x-shellscript",
    written_as="Bash, an array",
    content=(
        "arguments of Megatron-LM: tensor, sequence and context parallelism, full sharding, "
        "recomputation"
    ),
)
def to_megatron(outline: Outline) -> str:
    """A Bash array of the arguments that set the degree of each kind of parallelism.

    Megatron-LM decides itself how each parameter of its models is sharded. The degree of data
    parallelism follows from the number of ranks.

    Raises:
        PlanError: two axes are for tensor or for context parallelism.
    """
    outline.require_one_axis("tensor", "Megatron-LM")
    outline.require_one_axis("context", "Megatron-LM")
    lines = "".join(f"    {argument}\n" for argument in _arguments(outline))
    return f"{comment(_header(outline))}\nMEGATRON_ARGUMENTS=(\n{lines})\n"


def _arguments(outline: Outline) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {outline.degree('tensor')}"
    yield "--pipeline-model-parallel-size 1"
    yield f"--context-parallel-size {outline.degree('context')}"
    if _shards_sequences(outline):
        yield "--sequence-parallel"
    if outline.degree("shard") > 1:
        yield from _FULLY_SHARDED
        if outline.degree("replicate") > 1:
            yield f"--num-distributed-optimizer-instances {outline.degree('replicate')}"
    if outline.stage.checkpoints:
        yield from _RECOMPUTED


def _shards_sequences(outline: Outline) -> bool:
    """True if hidden states are reduce-scattered along the sequence over the tensor axis."""
    names = {outline.axes[axis] for axis in outline.roles.get("tensor", ())}
    return any(
        step.axis in names and (step.source, step.target) == ("P", "S(1)")
        for resharding in outline.stage.reshardings
        if len(outline.graph.values[resharding.value].shape) == _HIDDEN_STATES
        for step in resharding.steps
    )


def _header(outline: Outline) -> Iterator[str]:
    yield f"Arguments of Megatron-LM, from autoshard's {outline.title}."
    yield f"Source this file, and start {prod(outline.sizes)} ranks with torchrun:"
    yield 'pretrain_gpt.py "${MEGATRON_ARGUMENTS[@]}" and the arguments of model, data, optimizer.'
    yield ""
    yield from not_expressed(outline, _missing(outline))


def _missing(outline: Outline) -> Iterator[str]:
    yield "layouts of parameters and activations: Megatron-LM's models define them"
    if [axis for role in _ORDER for axis in outline.roles.get(role, ())] != [*outline.active]:
        yield (
            f"the order of the axes, {outline.named(outline.active)}: Megatron-LM nests tensor "
            f"parallelism in context parallelism, and that in data parallelism"
        )
    if outline.degree("shard") > 1:
        yield from _missing_of_sharding(outline)
    if outline.stage.checkpoints:
        yield "the choice of checkpointed blocks: every layer runs again in backward"


def _missing_of_sharding(outline: Outline) -> Iterator[str]:
    axes = outline.roles["shard"]
    sharded = [p for p in outline.parameters if any(p.layout.types[a].is_shard for a in axes)]
    replicated = [p.name for p in outline.parameters if p not in sharded]
    kept = [p.name for p in sharded if p.placed.name not in outline.regathered]
    if replicated:
        yield f"parameters that are replicated on {outline.named(axes)}: {folded(replicated)}"
    if kept:
        yield f"parameters that are not gathered again in backward: {folded(kept)}"
    yield "the sharded dims of full sharding: Megatron-FSDP shards flattened groups of parameters"
