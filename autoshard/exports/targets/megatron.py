"""Export to Megatron-LM: a Bash array of command-line arguments."""

from collections.abc import Iterator

from autoshard.exports.expressed import Expressed, headline
from autoshard.exports.outline import Outline, Role, comment, folded, not_expressed
from autoshard.exports.registry import export_target
from autoshard.exports.settings import settings_express
from autoshard.graph import DType, graph_from_json
from autoshard.plan.document import Pipeline
from autoshard.plan.stage import Stage

_FULLY_SHARDED = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy optim_grads_params",
    "--use-distributed-optimizer",
    "--no-gradient-accumulation-fusion",
    "--ckpt-format fsdp_dtensor",
)

_DISTRIBUTED = "--use-distributed-optimizer"

_RECOMPUTED = (
    "--recompute-granularity full",
    "--recompute-method uniform",
    "--recompute-num-layers 1",
)

_PRECISIONS = {DType.BFLOAT16: "--bf16", DType.FLOAT16: "--fp16"}

_SCHEDULES = ("1F1B", "Interleaved1F1B")

_ORDER: tuple[Role, ...] = ("replicate", "shard", "context", "tensor")
"""Roles of axes in Megatron-LM's order, outermost first."""

_MOST = 0.5

_HIDDEN_STATES = 3
"""Number of dims of batch, sequence and features."""


def _expresses(outline: Outline) -> Expressed:
    """The share of a plan that Megatron-LM's arguments express."""
    return settings_express(outline, sequence_parallel=_shards_sequences(outline), by_rows=False)


@export_target(
    "megatron",
    media_type="text/x-shellscript",
    written_as="Bash, an array",
    content=(
        "arguments of Megatron-LM: tensor, sequence, context and pipeline parallelism, full "
        "sharding, recomputation"
    ),
    expresses=_expresses,
    pipelines=True,
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
    yield from _pipeline(outline)
    yield f"--context-parallel-size {outline.degree('context')}"
    if _shards_sequences(outline):
        yield "--sequence-parallel"
    if outline.state_axes:
        yield from _FULLY_SHARDED if _is_fully_sharded(outline) else (_DISTRIBUTED,)
        if outline.degree("replicate") > 1:
            yield f"--num-distributed-optimizer-instances {outline.degree('replicate')}"
    if _recomputes(outline):
        yield from _RECOMPUTED
    if outline.compute_dtype in _PRECISIONS:
        yield _PRECISIONS[outline.compute_dtype]


def _pipeline(outline: Outline) -> Iterator[str]:
    pipeline = outline.plan.pipeline
    if pipeline is None:
        yield "--pipeline-model-parallel-size 1"
        return
    yield f"--pipeline-model-parallel-size {len(pipeline.ranks)}"
    if len(pipeline.ranks[0]) > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {len(pipeline.ranks[0])}"
    batch = next((a.shape[0] for a in pipeline.arguments if a.shape), 0)
    replicas = outline.degree("replicate") * outline.degree("shard")
    if batch and batch % replicas == 0:
        yield f"--micro-batch-size {batch // replicas}"
        yield f"--global-batch-size {batch * pipeline.micro_batches}"


def _is_fully_sharded(outline: Outline) -> bool:
    """True if most parameters are gathered again in backward, as by Megatron FSDP (ZeRO-3).

    The distributed optimizer (ZeRO-1) gathers them once, and keeps them until the next step.
    """
    return outline.plan.options.mode == "inference" or outline.kept_gathered < _MOST


def _recomputes(outline: Outline) -> bool:
    return any(stage.checkpoints for stage in outline.plan.stages)


def _shards_sequences(outline: Outline) -> bool:
    """True if hidden states are reduce-scattered along the sequence over the tensor axis."""
    names = {outline.axes[axis] for axis in outline.roles.get("tensor", ())}
    return any(
        names.issuperset(step.axes) and (step.source, step.target) == ("P", "S(1)")
        for resharding in outline.stage.reshardings
        if len(outline.graph.values[resharding.value].shape) == _HIDDEN_STATES
        for step in resharding.steps
    )


def _header(outline: Outline) -> Iterator[str]:
    yield headline(_expresses(outline))
    yield f"Arguments of Megatron-LM, from autoshard's {outline.title}."
    yield f"Source this file, and start {outline.plan.mesh.num_devices} ranks with torchrun:"
    yield 'pretrain_gpt.py "${MEGATRON_ARGUMENTS[@]}" and the arguments of model, data, optimizer.'
    yield ""
    yield from not_expressed(outline, _missing(outline))


def _missing(outline: Outline) -> Iterator[str]:
    yield "layouts of single parameters and activations: Megatron-LM's models define them"
    if [axis for role in _ORDER for axis in outline.roles.get(role, ())] != [*outline.active]:
        yield (
            f"the order of the axes, {outline.named(outline.active)}: Megatron-LM nests tensor "
            f"parallelism in context parallelism, and that in data parallelism"
        )
    if outline.state_axes:
        yield from _missing_of_sharding(outline)
    if outline.plan.pipeline is not None:
        yield from _missing_of_pipeline(outline, outline.plan.pipeline)
    if outline.compute_dtype in _PRECISIONS and not (
        outline.plan.options.training.master_weights or outline.policy is not None
    ):
        yield "updates without float32 copies of parameters: Megatron-LM keeps such copies"
    if _recomputes(outline):
        yield "the choice of checkpointed blocks: every layer runs again in backward"


def _missing_of_pipeline(outline: Outline, pipeline: Pipeline) -> Iterator[str]:
    if pipeline.schedule not in _SCHEDULES:
        yield f"the schedule {pipeline.schedule}: Megatron-LM runs 1F1B, or interleaved 1F1B"
    places = ", ".join(map(_begin, outline.plan.stages[1:]))
    yield (
        f"where stages begin, {places}: Megatron-LM gives all stages the same number of layers, "
        f"unless its arguments of uneven pipelines are set"
    )


def _begin(stage: Stage) -> str:
    """The module of the first operator of a stage that reads a parameter."""
    nodes = graph_from_json(stage.program).nodes
    parameters = {placed.name for placed in stage.parameters}
    first = next((x for x in nodes if not parameters.isdisjoint(x.inputs)), nodes[0])
    return first.module or first.name


def _missing_of_sharding(outline: Outline) -> Iterator[str]:
    axes, is_full = outline.state_axes, _is_fully_sharded(outline)
    sharded = [p for p in outline.parameters if any(p.layout.types[a].is_shard for a in axes)]
    replicated = [p.name for p in outline.parameters if p not in sharded]
    again = {p.name for p in sharded if p.placed.name in outline.regathered}
    if replicated:
        yield f"parameters that are replicated on {outline.named(axes)}: {folded(replicated)}"
    others = [p.name for p in sharded if (p.name in again) != is_full]
    if others:
        seldom = "not gathered" if is_full else "gathered"
        yield f"parameters that are {seldom} again in backward: {folded(others)}"
    what = "Megatron-FSDP" if is_full else "the distributed optimizer"
    yield f"the sharded dims of parameters at rest: {what} shards flattened groups of parameters"
