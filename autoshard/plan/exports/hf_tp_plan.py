"""A `tp_plan` for transformers."""

from collections.abc import Iterator, Mapping

from autoshard.errors import PlanError
from autoshard.plan.exports.comments import comment, folded, not_expressed, pattern
from autoshard.plan.exports.linears import Cut, CutModule, cut_modules
from autoshard.plan.exports.outline import Outline

_CODE = """
TP_SIZE = {size}
TP_PLAN = {{
{rules}
}}
"""


def to_hf_tp_plan(outline: Outline) -> str:
    """Python with `TP_SIZE` and `TP_PLAN`, for transformers' `DistributedConfig`.

    Its rules are for all layers at once, so layers must be cut alike. Modules that the plan
    leaves whole are named too, since transformers adds the model's own rules to those given.

    Raises:
        PlanError: no layer is cut in a way that transformers knows.
    """
    axis = outline.tensor_axis
    modules = {} if axis is None else cut_modules(outline, axis)
    rules = _rules(modules)
    if axis is None or set(rules.values()) <= {"replicate"}:
        raise PlanError(
            "the plan cuts no linear layer or embedding over an axis that leaves the batch whole, "
            "which is all that a tp_plan can say; export to fsdp2 or parallelize-module"
        )
    code = _CODE.format(
        size=outline.sizes[axis],
        rules="\n".join(f"    {name!r}: {rule!r}," for name, rule in rules.items()),
    )
    return comment(_header(outline, axis, rules)) + code


def _rules(modules: Mapping[str, CutModule]) -> dict[str, str]:
    styles: dict[str, set[str]] = {}
    for name, module in modules.items():
        if not name:  # a rule has to name a module; what the root holds is whole anyway
            continue
        styles.setdefault(pattern(name), set()).add(_style(module))
    return {
        name: next(iter(found)) if len(found) == 1 else "replicate"
        for name, found in styles.items()
    }


def _style(module: CutModule) -> str:
    match module.cut:
        case Cut.COLUMNS:
            return "colwise" if module.local else "colwise_gather_output"
        case Cut.ROWS:
            return "rowwise" if module.local else "rowwise_split_input"
        case Cut.VOCABULARY:
            return "embedding_rowwise"
        case Cut.FEATURES:
            return "embedding_colwise"
        case Cut.WHOLE | Cut.OTHER | Cut.REACHED_FOR:
            return "replicate"


def _header(outline: Outline, axis: int, rules: Mapping[str, str]) -> Iterator[str]:
    yield f"Tensor parallelism over {outline.axes[axis]}, from autoshard's {outline.title}."
    yield "Use: AutoModelForCausalLM.from_pretrained("
    yield "    name, distributed_config=DistributedConfig(tp_size=TP_SIZE, tp_plan=TP_PLAN))"
    yield "with transformers' DistributedConfig (5.20 or later), under torchrun;"
    yield "it needs the package accelerate."
    yield ""
    yield from not_expressed(_missing(outline, axis, rules))


def _missing(outline: Outline, axis: int, rules: Mapping[str, str]) -> Iterator[str]:
    for other in outline.active:
        if other != axis:
            yield f"the axis {outline.axes[other]}"
    whole = [
        parameter.name
        for parameter in outline.parameters
        if parameter.layout.types[axis].is_shard
        and rules.get(pattern(parameter.module), "replicate") == "replicate"
    ]
    if whole:
        yield f"the cuts of {folded(whole)}, which stay whole on every rank"
    yield "layouts of activations outside of what lies between `colwise` and `rowwise`"
