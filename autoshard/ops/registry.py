"""Lookup of operators: what the specs of all families say about a call."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoshard.errors import SchemaError
from autoshard.graph import CallRule, Graph
from autoshard.ops import (
    attention,
    convolution,
    creation,
    experts,
    indexing,
    loss,
    matmul,
    normalisation,
    pointwise,
    reduction,
    views,
)
from autoshard.ops.index_space import given_rule, replicated
from autoshard.ops.rule import OperatorRule
from autoshard.ops.spec import (
    NOTHING_SAVED,
    Call,
    ExtraTensor,
    Gradients,
    OperatorSpec,
    SavedByAutograd,
    saved_by_name,
    saves_everything,
)
from autoshard.ops.strides import Shape, Strides, contiguous_strides, normalised, permuted

FAMILIES = (
    matmul,
    attention,
    normalisation,
    pointwise,
    reduction,
    loss,
    views,
    indexing,
    convolution,
    experts,
    creation,
)

SPECS = {name: spec for family in FAMILIES for spec in family.SPECS for name in spec.names}
"""Specs by operator (`aten.max.dim`), or by packet for all overloads (`aten.add`)."""

_UNKNOWN = OperatorSpec(operators="", rule=replicated, saves=saves_everything)


def spec_for(operator: str) -> OperatorSpec:
    """The spec of an operator; one that is not known is replicated, and saves everything."""
    return SPECS.get(operator) or SPECS.get(operator.rpartition(".")[0]) or _UNKNOWN


def has_rule(operator: str) -> bool:
    """Whether an operator has a rule of its own."""
    return spec_for(operator) is not _UNKNOWN


def is_view(operator: str) -> bool:
    """Whether an operator's outputs share its input's memory, so that it costs nothing."""
    return spec_for(operator).is_view


def rule_for(call: Call) -> OperatorRule:
    """The sharding rule of a call.

    If the library has none, the one that came with the graph counts. Otherwise the operator is
    replicated, which is right for every deterministic one; every operator of ATen that draws
    random numbers has a rule.

    Raises:
        SchemaError: arguments and shapes contradict each other.
    """
    spec = spec_for(call.operator)
    try:
        if spec is _UNKNOWN and call.given is not None:
            return given_rule(call, call.given)
        return spec.rule(call)
    except (LookupError, TypeError, ValueError) as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in call.inputs)
        raise SchemaError(
            f"{call.operator} on shapes {shapes or 'none'} does not fit its schema: {error}"
        ) from error


def with_rules(graph: Graph, rules: Iterable[CallRule]) -> Graph:
    """A graph with those of some rules that its calls need: they have no other rule."""
    by_call = {rule.call: rule for rule in rules}
    used = {rule.call: rule for rule in graph.rules}
    for node in graph.nodes:
        call = graph.call_of(node)
        if call in by_call and not has_rule(node.operator):
            used.setdefault(call, by_call[call])
    return replace(graph, rules=tuple(used.values())) if len(used) > len(graph.rules) else graph


def saved_tensors(call: Call, gradients: Gradients) -> SavedByAutograd:
    """The tensors that autograd saves of a call for its backward.

    Args:
        call: the call; shapes matter only by their number of dims and where they are 1.
        gradients: whether each input needs a gradient.
    """
    if not any(gradients) or not any(tensor.dtype.is_differentiable for tensor in call.outputs):
        return NOTHING_SAVED
    saves = spec_for(call.operator).saves
    if isinstance(saves, str):
        return saved_by_name(saves, call, gradients)
    return saves(call, gradients)


def backward_workspace(call: Call, gradients: Gradients) -> tuple[ExtraTensor, ...]:
    """Temporary tensors of a call's backward, beside the gradients that it returns.

    Args:
        call: the call.
        gradients: whether each input needs a gradient.
    """
    workspace = spec_for(call.operator).backward_workspace
    return () if workspace is None else workspace(call, gradients)


def passes_gradient(call: Call, position: int) -> bool:
    """Whether an input's gradient is the output's gradient itself, or a view of it.

    Backward of the call then allocates no tensor for it: sums without broadcasting, joins, and
    views whose backward is a view.

    Args:
        call: the call.
        position: position of the input.
    """
    passes = spec_for(call.operator).passes_gradient
    return passes is not None and passes(call, position)


def view_strides(
    call: Call, shape: Shape, strides: Strides, output_shapes: Sequence[Shape]
) -> tuple[Strides, ...] | None:
    """Strides of outputs that share the first input's memory; None if they have their own.

    Args:
        call: the call; its sizes are not used.
        shape: local shape of the first input.
        strides: strides of the first input.
        output_shapes: local shape of each output.
    """
    function = spec_for(call.operator).strides
    if function is None:
        return None
    full = contiguous_strides(shape) if strides is None else strides
    found = function(call, shape, full, output_shapes[0])
    return None if found is None else tuple(normalised(found, shape) for shape in output_shapes)


def made_strides(
    call: Call, shapes: Sequence[Shape], strides: Sequence[Strides], output: Shape
) -> Strides:
    """Strides of an output that has memory of its own.

    Elementwise operators keep the memory order of their first input of the output's shape, as
    `TensorIterator` does, and fused attention that of the queries. All others are contiguous.

    Args:
        call: the call; its sizes are not used.
        shapes: local shape of each input.
        strides: strides of each input.
        output: local shape of the output.
    """
    if spec_for(call.operator).keeps_memory_order:
        first = next((s for s, shape in zip(strides, shapes, strict=True) if shape == output), None)
        if first is not None and 0 not in first:
            return permuted(sorted(range(len(output)), key=lambda dim: -first[dim]), output)
    return None
