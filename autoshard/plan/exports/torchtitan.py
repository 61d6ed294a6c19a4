"""Settings of torchtitan's `[parallelism]`, as its releases up to 0.2 read them from TOML."""

from collections.abc import Iterator, Sequence

from autoshard.errors import PlanError
from autoshard.layouts import Layout
from autoshard.plan.exports.outline import Outline, comment, folded, not_expressed

_DEGREES = {
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "tensor_parallel_degree": "tensor",
    "context_parallel_degree": "context",
    "pipeline_parallel_degree": "pipeline",
}


def to_torchtitan(outline: Outline) -> str:
    """TOML with the degrees of parallelism, resharding and activation checkpointing.

    torchtitan decides itself how each parameter of its models is cut; only what each axis is
    for can be said.

    Raises:
        PlanError: two axes are for the same, in a way that has one degree.
    """
    roles = _roles(outline)
    lines = ["", "[parallelism]"]
    for setting, role in _DEGREES.items():
        lines.append(f"{setting} = {_degree(outline, roles.get(role, ()))}")
    lines.append(f'fsdp_reshard_after_forward = "{_resharding(outline)}"')
    lines += ["", "[activation_checkpoint]", f'mode = "{_checkpointing(outline)}"', ""]
    return comment(_header(outline, roles)) + "\n".join(lines)


def _roles(outline: Outline) -> dict[str, list[int]]:
    """What each axis is for. Data-parallel axes shard, or only replicate."""
    roles: dict[str, list[int]] = {}
    for axis in outline.active:
        roles.setdefault(_role(outline, axis), []).append(axis)
    for role in ("tensor", "context"):
        if len(axes := roles.get(role, [])) > 1:
            raise PlanError(
                f"the axes {outline.named(axes)} are both for {role} parallelism, which has one "
                f"degree in torchtitan; plan on a mesh with fewer axes"
            )
    return roles


def _role(outline: Outline, axis: int) -> str:
    if axis in outline.data_axes:
        cut = any(p.layout.types[axis].is_shard for p in outline.parameters)
        return "shard" if cut else "replicate"
    given = [Layout.parse(i.layout) for i in outline.stage.inputs if i.kind == "user" and i.shape]
    along = given and all(layout.types[axis].dim == 1 for layout in given)
    return "context" if along else "tensor"


def _degree(outline: Outline, axes: Sequence[int]) -> int:
    degree = 1
    for axis in axes:
        degree *= outline.sizes[axis]
    return degree


def _resharding(outline: Outline) -> str:
    again = any(p.name in outline.regathered for p in outline.stage.parameters)
    return "always" if again else "never"


def _checkpointing(outline: Outline) -> str:
    return "full" if outline.stage.checkpoints else "none"


def _header(outline: Outline, roles: dict[str, list[int]]) -> Iterator[str]:
    yield f"Degrees for torchtitan (0.2 and earlier), from autoshard's {outline.title}."
    yield "Put these tables into a model's job config."
    yield ""
    yield from not_expressed(_missing(outline, roles))


def _missing(outline: Outline, roles: dict[str, list[int]]) -> Iterator[str]:
    yield "how each parameter and activation is cut: torchtitan's own models decide that"
    for role, axes in roles.items():
        if len(axes) > 1:
            yield f"that {outline.named(axes)} are axes of their own: torchtitan makes them one"
        others = [
            p.name
            for p in outline.parameters
            if role == "shard" and any(p.layout.types[a].dim > 0 for a in axes)
        ]
        if others:
            yield f"cuts of other dims than the first: {folded(others)}"
    if outline.stage.checkpoints:
        yield "which blocks are checkpointed: `full` means all of them"
