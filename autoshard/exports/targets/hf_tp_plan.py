"""Export to a `tp_plan`, the tensor parallelism of transformers."""

from collections.abc import Iterator, Mapping

from autoshard.errors import PlanError
from autoshard.exports.expressed import Expressed, expressed, headline, operators_on_shards
from autoshard.exports.outline import Outline, comment, folded, not_expressed, pattern
from autoshard.exports.registry import export_target
from autoshard.exports.sharded_modules import ShardedModule, ShardStyle, tensor_parallelism
from autoshard.graph.parallel_layers import LayerKind

_HF_CODE = """
TP_SIZE = {size}
DTYPE = {dtype!r}
AUTOCAST = {autocast!r}
TP_PLAN = {{
{rules}
}}
"""


def _axis_and_rules(outline: Outline) -> tuple[int, dict[str, str]]:
    """The tensor-parallel axis, and the rule of each module.

    Raises:
        PlanError: no layer is sharded in a way that transformers supports.
    """
    axis = outline.tensor_axis
    rules = {} if axis is None else _hf_rules(tensor_parallelism(outline, axis).modules)
    if axis is None or set(rules.values()) <= {"replicate"}:
        raise PlanError(
            "a tp_plan can express only linear layers and embeddings that are sharded over an axis "
            "which does not shard the batch; the plan has none: plan with "
            "exportable_to='hf-tp-plan', or export to fsdp2 or parallelize-module"
        )
    return axis, rules


def _hf_expresses(outline: Outline) -> Expressed:
    """The share of a plan that a tp_plan expresses."""
    axis, rules = _axis_and_rules(outline)
    found = tensor_parallelism(outline, axis)
    placed = [
        p
        for p in outline.parameters
        if all(t.is_replicated for a, t in enumerate(p.layout.types) if a != axis)
        and (
            p.layout.types[axis].is_replicated
            or rules.get(pattern(p.module), "replicate") != "replicate"
        )
    ]
    replicated = {
        node.name
        for name, module in found.modules.items()
        if module.layer is not None and rules.get(pattern(name), "replicate") == "replicate"
        for call in module.layer.calls
        for node in call.nodes
    }
    on_shards = (found.layers | found.inner) - replicated
    operators = operators_on_shards(outline, data=(), tensor=axis, on_shards=on_shards)
    return expressed(outline, placed, operators)


@export_target(
    "hf-tp-plan",
    media_type="text/x-python",
    written_as="Python, `TP_SIZE`, `TP_PLAN` and element types",
    content="linear layers and embeddings that are sharded over one axis, in all layers alike",
    expresses=_hf_expresses,
)
def to_hf_tp_plan(outline: Outline) -> str:
    """Python with `TP_SIZE` and `TP_PLAN`, for transformers' `DistributedConfig`.

    Its rules are for all layers at once, so layers must be sharded alike. Modules that the plan
    replicates are listed too, since transformers adds the model's default rules to those given.

    Raises:
        PlanError: no layer is sharded in a way that transformers supports.
    """
    axis, rules = _axis_and_rules(outline)
    code = _HF_CODE.format(
        size=outline.sizes[axis],
        dtype=str(outline.stored_dtype),
        autocast=None if outline.policy is None else str(outline.compute_dtype),
        rules="\n".join(f"    {name!r}: {rule!r}," for name, rule in rules.items()),
    )
    return comment(_hf_header(outline, axis, rules)) + code


def _hf_rules(modules: Mapping[str, ShardedModule]) -> dict[str, str]:
    styles: dict[str, set[str]] = {}
    for name, module in modules.items():
        if not name:  # rules need the name of a module; parameters of the root are replicated
            continue
        styles.setdefault(pattern(name), set()).add(_hf_style(module))
    return {
        name: next(iter(found)) if len(found) == 1 else "replicate"
        for name, found in styles.items()
    }


def _hf_style(module: ShardedModule) -> str:
    match module.style:
        case _ if module.layer is None or module.layer.kind is LayerKind.CONV1D:
            return "replicate"
        case ShardStyle.COLUMNS:
            return "colwise" if module.local else "colwise_gather_output"
        case ShardStyle.ROWS:
            return "rowwise" if module.local else "rowwise_split_input"
        case ShardStyle.VOCABULARY:
            return "embedding_rowwise"
        case ShardStyle.FEATURES:
            return "embedding_colwise"
        case ShardStyle.WHOLE | ShardStyle.OTHER | ShardStyle.READ_ELSEWHERE:
            return "replicate"


def _hf_header(outline: Outline, axis: int, rules: Mapping[str, str]) -> Iterator[str]:
    yield headline(_hf_expresses(outline))
    yield f"Tensor parallelism over {outline.axes[axis]}, from autoshard's {outline.title}."
    yield "Use: AutoModelForCausalLM.from_pretrained("
    yield "    name, dtype=DTYPE,"
    yield "    distributed_config=DistributedConfig(tp_size=TP_SIZE, tp_plan=TP_PLAN))"
    if outline.policy is not None:
        yield "and run it under torch.autocast(device, getattr(torch, AUTOCAST)),"
    yield "with transformers' DistributedConfig (5.20 or later), under torchrun;"
    yield "it needs the package accelerate."
    yield ""
    yield from not_expressed(outline, _hf_missing(outline, axis, rules))


def _hf_missing(outline: Outline, axis: int, rules: Mapping[str, str]) -> Iterator[str]:
    for other in outline.active:
        if other != axis:
            yield f"parallelism over {outline.axes[other]}: its ranks repeat each other's work"
    whole = [
        parameter.name
        for parameter in outline.parameters
        if parameter.layout.types[axis].is_shard
        and rules.get(pattern(parameter.module), "replicate") == "replicate"
    ]
    if whole:
        yield f"the sharding of {folded(whole)}, which stay replicated"
    found = tensor_parallelism(outline, axis)
    apart = [n for n, m in found.modules.items() if m.is_product and not m.local]
    if apart:
        yield f"sharded activations around {folded(apart)}: they are gathered or sliced"
