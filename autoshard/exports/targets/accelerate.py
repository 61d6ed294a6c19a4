"""Export to accelerate: the file of `accelerate launch --config_file`, with FSDP2 or DDP."""

from collections.abc import Iterator

from autoshard.exports.expressed import Expressed, expressed, headline, operators_on_shards
from autoshard.exports.outline import (
    Outline,
    OwnedParameter,
    at_rest,
    comment,
    folded,
    not_expressed,
)
from autoshard.exports.registry import export_target
from autoshard.graph import DType
from autoshard.layouts import I, Layout, S

_PRECISIONS: dict[DType | None, str] = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}


def _expresses(outline: Outline) -> Expressed:
    """The share of a plan that accelerate on the data-parallel axes expresses."""
    placed = [p for p in outline.parameters if _is_placed(outline, p)]
    data = outline.data_axes
    operators = operators_on_shards(outline, data=data, tensor=None, on_shards=())
    return expressed(outline, placed, operators)


@export_target(
    "accelerate",
    media_type="application/yaml",
    written_as="YAML",
    content=(
        "settings of `accelerate launch`: FSDP2 over the data-parallel axes or within replicas, or "
        "DDP; resharding after forward, activation checkpointing; nothing of other axes"
    ),
    expresses=_expresses,
)
def to_accelerate(outline: Outline) -> str:
    """YAML for `accelerate launch`, whose FSDP2 shards every parameter along dim 0.

    Raises:
        PlanError: several axes are for replicas, or for shards, which have one degree each.
    """
    outline.require_one_axis("replicate", "accelerate")
    outline.require_one_axis("shard", "accelerate")
    return comment(_header(outline)) + "\n" + "\n".join(_settings(outline)) + "\n"


def _settings(outline: Outline) -> Iterator[str]:
    replicas, shards = outline.degree("replicate"), outline.degree("shard")
    yield "compute_environment: LOCAL_MACHINE"
    yield f"distributed_type: {_distributed_type(replicas, shards)}"
    yield f"num_processes: {replicas * shards}"
    yield f"mixed_precision: {_mixed_precision(outline)}"
    if shards == 1:
        return
    yield "fsdp_config:"
    yield "  fsdp_version: 2"
    yield "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    yield f"  fsdp_reshard_after_forward: {_yaml(_is_resharded(outline))}"
    yield f"  fsdp_activation_checkpointing: {_yaml(bool(outline.stage.checkpoints))}"
    yield "  fsdp_state_dict_type: SHARDED_STATE_DICT"
    if replicas > 1:
        yield "parallelism_config:"
        yield f"  parallelism_config_dp_replicate_size: {replicas}"
        yield f"  parallelism_config_dp_shard_size: {shards}"


def _mixed_precision(outline: Outline) -> str:
    policy = outline.policy
    return "'no'" if policy is None else _PRECISIONS.get(policy.param_dtype, "'no'")


def _distributed_type(replicas: int, shards: int) -> str:
    if shards > 1:
        return "FSDP"
    return "MULTI_GPU" if replicas > 1 else "'NO'"


def _yaml(flag: bool) -> str:  # noqa: FBT001  it is the value itself
    return "true" if flag else "false"


def _is_resharded(outline: Outline) -> bool:
    return any(p.name in outline.regathered for p in outline.stage.parameters)


def _is_placed(outline: Outline, parameter: OwnedParameter) -> bool:
    sharding = outline.roles.get("shard", ())
    types = [S(0) if axis in sharding else I for axis in range(len(outline.axes))]
    return at_rest(parameter.layout) == Layout(tuple(types))


def _header(outline: Outline) -> Iterator[str]:
    yield headline(_expresses(outline))
    yield f"Settings for accelerate, from autoshard's {outline.title}."
    yield "Use: accelerate launch --config_file FILE script.py"
    yield ""
    yield from not_expressed(outline, _missing(outline))


def _missing(outline: Outline) -> Iterator[str]:
    others = [axis for axis in outline.active if axis not in outline.data_axes]
    if others:
        yield f"parallelism over {outline.named(others)}, whose ranks are left out"
    apart = [p.name for p in outline.parameters if not _is_placed(outline, p)]
    if apart:
        yield f"parameters that the plan stores otherwise: {folded(apart)}"
    if outline.roles.get("shard"):
        yield "a choice for each block: all are resharded after forward, or none, and so recomputed"
    policy = outline.policy
    if policy is not None and (policy.reduce_dtype or policy.param_dtype) != policy.param_dtype:
        yield f"{policy.reduce_dtype} sums of gradients: accelerate reduces in its compute type"
    yield "the number of machines, and what the script decides: batch size and types of parameters"
