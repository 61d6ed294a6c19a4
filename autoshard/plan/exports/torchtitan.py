"""Export to torchtitan: the TOML table `[parallelism]` of its releases up to 0.2."""

from collections.abc import Iterator

from autoshard.plan.exports.outline import Outline, Role, comment, folded, not_expressed
from autoshard.plan.exports.target import export_target

_DEGREES: dict[str, Role] = {
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "tensor_parallel_degree": "tensor",
    "context_parallel_degree": "context",
}


@export_target(
    "torchtitan",
    media_type="application/toml",
    written_as="TOML",
    content="degrees of parallelism, resharding after forward, activation checkpointing",
)
def to_torchtitan(outline: Outline) -> str:
    """TOML with the degrees of parallelism, resharding and activation checkpointing.

    torchtitan decides itself how each parameter of its models is sharded; only the purpose of
    each axis can be configured.

    Raises:
        PlanError: two axes are for the same kind of parallelism, which has only one degree.
    """
    outline.require_one_axis("tensor", "torchtitan")
    outline.require_one_axis("context", "torchtitan")
    lines = ["", "[parallelism]"]
    lines += [f"{setting} = {outline.degree(role)}" for setting, role in _DEGREES.items()]
    lines.append("pipeline_parallel_degree = 1")
    lines.append(f'fsdp_reshard_after_forward = "{_resharding(outline)}"')
    lines += ["", "[activation_checkpoint]", f'mode = "{_checkpointing(outline)}"', ""]
    return comment(_header(outline)) + "\n".join(lines)


def _resharding(outline: Outline) -> str:
    again = any(p.name in outline.regathered for p in outline.stage.parameters)
    return "always" if again else "never"


def _checkpointing(outline: Outline) -> str:
    return "full" if outline.stage.checkpoints else "none"


def _header(outline: Outline) -> Iterator[str]:
    yield f"Degrees for torchtitan (0.2 and earlier), from autoshard's {outline.title}."
    yield "Put these tables into the job config of a model."
    yield ""
    yield from not_expressed(outline, _missing(outline))


def _missing(outline: Outline) -> Iterator[str]:
    yield "layouts of parameters and activations: torchtitan's models define them"
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
    if outline.stage.checkpoints:
        yield "the choice of checkpointed blocks: `full` means all of them"
