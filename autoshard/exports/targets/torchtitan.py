"""Export to torchtitan: the TOML table `[parallelism]` of its releases up to 0.2."""

import json
import re
from collections.abc import Iterable, Iterator

from autoshard.errors import PlanError
from autoshard.exports.expressed import Expressed, headline
from autoshard.exports.outline import Outline, Role, comment, folded, not_expressed
from autoshard.exports.registry import export_target
from autoshard.exports.settings import settings_express, stage_outlines
from autoshard.graph import DType, module_paths
from autoshard.plan.modules import stage_modules

_DEGREES: dict[str, Role] = {
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "tensor_parallel_degree": "tensor",
    "context_parallel_degree": "context",
}


_DEGREES_ORDER: tuple[Role, ...] = ("replicate", "shard", "context", "tensor")
"""Roles as torchtitan nests them, outermost first."""
_LAYER = re.compile(r"(?:.*\.)?\d+")
"""Path of a module whose last part is a number."""


def _expresses(outline: Outline) -> Expressed:
    """The share of a plan that torchtitan's models of the same architecture express."""
    return settings_express(outline, sequence_parallel=True, by_rows=True)


@export_target(
    "torchtitan",
    media_type="application/toml",
    written_as="TOML",
    content=(
        "degrees of parallelism, modules of pipeline stages, resharding after forward, activation "
        "checkpointing"
    ),
    expresses=_expresses,
    pipelines=True,
)
def to_torchtitan(outline: Outline) -> str:
    """TOML with the degrees of parallelism, resharding and activation checkpointing.

    torchtitan decides itself how each parameter of its models is sharded; only the purpose of
    each axis can be configured.

    Raises:
        PlanError: two axes are for the same kind of parallelism, which has only one degree, or a
            pipeline stage begins inside a layer.
    """
    outline.require_one_axis("tensor", "torchtitan")
    outline.require_one_axis("context", "torchtitan")
    stages = stage_outlines(outline)
    lines = ["", "[parallelism]"]
    lines += [f"{setting} = {outline.degree(role)}" for setting, role in _DEGREES.items()]
    lines += _pipeline(outline)
    lines.append(f'fsdp_reshard_after_forward = "{_resharding(stages)}"')
    lines += ["", "[training]", *_element_types(outline)]
    lines += ["", "[activation_checkpoint]", f'mode = "{_checkpointing(stages)}"', ""]
    return comment(_header(outline)) + "\n".join(lines)


def _element_types(outline: Outline) -> Iterator[str]:
    yield f'dtype = "{outline.stored_dtype}"'
    yield f'mixed_precision_param = "{outline.compute_dtype}"'
    yield f'mixed_precision_reduce = "{_reduced(outline)}"'


def _reduced(outline: Outline) -> DType | None:
    """Element type of reductions of gradients."""
    policy = outline.policy
    return outline.compute_dtype if policy is None else policy.reduce_dtype or policy.param_dtype


def _pipeline(outline: Outline) -> Iterator[str]:
    pipeline = outline.plan.pipeline
    yield f"pipeline_parallel_degree = {len(pipeline.ranks) if pipeline else 1}"
    if pipeline is None:
        return
    yield f'pipeline_parallel_schedule = "{pipeline.schedule}"'
    yield "module_fqns_per_model_part = ["
    for number, modules in enumerate(stage_modules(outline.plan)):
        for path in (*modules.whole, *modules.parts):
            if _is_inside_layer(path) or (path in modules.parts and _LAYER.fullmatch(path)):
                raise PlanError(
                    f"stage {number} has a part of a layer, {path}, but torchtitan cuts between "
                    f"layers: plan with balance, such as the number of layers of each stage, or "
                    f"with cuts before layers"
                )
        yield f"    {json.dumps(modules.whole)},"
    yield "]"
    batch = next((a.shape[0] for a in pipeline.arguments if a.shape), 0)
    replicas = outline.degree("replicate") * outline.degree("shard")
    if batch and batch % replicas == 0:
        yield f"pipeline_parallel_microbatch_size = {batch // replicas}"


def _is_inside_layer(path: str) -> bool:
    around = [*module_paths(path)][:-1]
    return any(_LAYER.fullmatch(outer) for outer in around)


def _resharding(stages: Iterable[Outline]) -> str:
    again = any(p.name in one.regathered for one in stages for p in one.stage.parameters)
    return "always" if again else "never"


def _checkpointing(stages: Iterable[Outline]) -> str:
    return "full" if any(one.stage.checkpoints for one in stages) else "none"


def _header(outline: Outline) -> Iterator[str]:
    yield headline(_expresses(outline))
    yield f"Degrees for torchtitan (0.2 and earlier), from autoshard's {outline.title}."
    yield "Put these tables into the job config of a model."
    yield ""
    yield from not_expressed(outline, _missing(outline))


def _missing(outline: Outline) -> Iterator[str]:
    yield "layouts of single parameters and activations: torchtitan's models define them"
    if outline.degree("tensor") > 1 < outline.degree("replicate") and not outline.state_axes:
        yield "DDP with TP: torchtitan refuses to combine them, without sharded parameters"
    order = [axis for role in _DEGREES_ORDER for axis in outline.roles.get(role, ())]
    if order != [*outline.active]:
        yield (
            f"the order of the axes, {outline.named(outline.active)}: torchtitan nests tensor "
            f"parallelism in context parallelism, that in shards, and those in replicas"
        )
    for role, axes in outline.roles.items():
        if len(axes) > 1:
            yield f"{outline.named(axes)} as separate axes: torchtitan merges them into one"
        others = [
            p.name
            for p in outline.parameters
            if role == "shard" and any(p.layout.types[a].dim > 0 for a in axes)
        ]
        if others:
            yield f"sharding of other dims than the first: {folded(others)}"
    if _reduced(outline) is not DType.FLOAT32:
        yield f"{_reduced(outline)} sums of gradients: torchtitan 0.2 knows float32 alone"
    if any(stage.checkpoints for stage in outline.plan.stages):
        yield "the choice of checkpointed blocks: `full` means all of them"
