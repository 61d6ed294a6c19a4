"""Registry of operator specs, and functions that look up the properties of a call."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from autoshard.errors import SchemaError
from autoshard.graph import OPAQUE_MODULE, CallRule, Graph, Node
from autoshard.ops import (
    attention,
    convolution,
    creation,
    experts,
    indexing,
    loss,
    matmul,
    normalisation,
    opaque,
    pointwise,
    reduction,
    views,
)
from autoshard.ops.rules.index_space import operator_rule, replicated
from autoshard.ops.rules.rule import OperatorRule
from autoshard.ops.rules.spec import (
    NOTHING_SAVED,
    Call,
    ExtraTensor,
    Gradients,
    OperatorSpec,
    SavedByAutograd,
    saved_by_name,
    saves_everything,
)
from autoshard.ops.rules.strides import Shape, Strides, contiguous_strides, normalised, permuted

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

_FUSIBLE = (
    *pointwise.SPECS,
    *normalisation.SPECS,
    *(SPECS[f"aten.{name}"] for name in ("sum", "mean", "amax", "softmax.int", "log_softmax.int")),
    *(SPECS[f"aten.{name}.default"] for name in ("cat", "dropout")),
)
"""Specs of operators that TorchInductor fuses: pointwise ones, normalisations, reductions."""

_UNKNOWN = OperatorSpec(operators="", rule=replicated, saves=saves_everything)


def spec_for(operator: str) -> OperatorSpec:
    """Return the spec of an operator; unknown operators are replicated and save everything."""
    if operator == OPAQUE_MODULE:
        return opaque.SPEC
    return SPECS.get(operator) or SPECS.get(operator.rpartition(".")[0]) or _UNKNOWN


def has_rule(operator: str) -> bool:
    """True if an operator has a built-in rule."""
    return spec_for(operator) is not _UNKNOWN


def is_fusible(operator: str) -> bool:
    """True if a compiler fuses an operator with the pointwise operators around it."""
    return spec_for(operator) in _FUSIBLE


def is_view(operator: str) -> bool:
    """True if an operator's outputs always share its input's memory."""
    return spec_for(operator).is_view


def draws_random_numbers(node: Node) -> bool:
    """True if a node draws random numbers, so that its result depends on the step."""
    draws = spec_for(node.operator).draws
    if not draws:
        return draws is not None
    return bool(node.argument(draws, _DEFAULT_PROBABILITY.get(draws)))


_DEFAULT_PROBABILITY = {"p": 0.5, "dropout_p": 0.0}


@lru_cache(maxsize=1 << 12)
def rule_for(call: Call) -> OperatorRule:
    """Return the sharding rule of a call.

    Without a built-in rule, the rule in the graph is used, if there is one. Otherwise the operator
    is replicated, which is valid for every deterministic operator; all ATen operators that draw
    random numbers have a built-in rule.

    Raises:
        SchemaError: arguments and shapes contradict each other.
    """
    spec = spec_for(call.operator)
    try:
        custom = call.custom_rule if spec is _UNKNOWN else None
        rule = spec.rule(call) if custom is None else operator_rule(call, custom)
        _check_sizes(call, rule)
    except (LookupError, TypeError, ValueError) as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in call.inputs)
        raise SchemaError(
            f"{call.operator} on shapes {shapes or 'none'} does not fit its schema: {error}"
        ) from error
    return rule


def _check_sizes(call: Call, rule: OperatorRule) -> None:
    """Check that tensors have the dims that a rule says.

    Raises:
        ValueError: an export or a document gives a tensor another shape than the operator does.
    """
    tensors = (*call.inputs, *call.outputs)
    for tensor, dims in zip(tensors, (*rule.inputs, *rule.outputs), strict=True):
        pairs = zip(tensor.shape, dims, strict=False)
        differs = any(x and prod(rule.sizes[letter] for letter in x) != size for size, x in pairs)
        if differs or len(tensor.shape) != len(dims):
            raise ValueError(f"a tensor has the shape {list(tensor.shape)}")


def with_rules(graph: Graph, rules: Iterable[CallRule]) -> Graph:
    """Return the graph with those of `rules` that apply to calls without a built-in rule."""
    by_call = {rule.call: rule for rule in rules}
    used = {rule.call: rule for rule in graph.rules}
    for node in graph.nodes:
        call = graph.call_of(node)
        if call in by_call and not has_rule(node.operator):
            used.setdefault(call, by_call[call])
    return replace(graph, rules=tuple(used.values())) if len(used) > len(graph.rules) else graph


def saved_tensors(
    call: Call, gradients: Gradients, *, is_compiled: bool = False
) -> SavedByAutograd:
    """Return the tensors of a call that autograd saves for backward.

    Args:
        call: the call; only the number of dims, and dims of size 1, matter.
        gradients: for each input, True if it needs a gradient.
        is_compiled: True if a compiler generates the kernels of both passes.
    """
    if not any(gradients) or not any(tensor.dtype.is_differentiable for tensor in call.outputs):
        return NOTHING_SAVED
    spec = spec_for(call.operator)
    saves = (spec.compiled_saves if is_compiled else None) or spec.saves
    if isinstance(saves, str):
        return saved_by_name(saves, call, gradients)
    return saves(call, gradients)


def backward_workspace(call: Call, gradients: Gradients) -> tuple[ExtraTensor, ...]:
    """Return the temporary tensors of a call's backward, without the gradients that it returns.

    Args:
        call: the call.
        gradients: for each input, True if it needs a gradient.
    """
    workspace = spec_for(call.operator).backward_workspace
    return () if workspace is None else workspace(call, gradients)


def saves_less_compiled(operator: str) -> bool:
    """True if an operator saves other tensors where a compiler generates its kernels."""
    return spec_for(operator).compiled_saves is not None


def passes_gradient(call: Call, position: int) -> bool:
    """True if an input's gradient is the output's gradient itself, or a view of it.

    Backward then allocates no tensor for it: sums without broadcasting, concatenations, and views
    whose backward is a view.

    Args:
        call: the call.
        position: position of the input.
    """
    passes = spec_for(call.operator).passes_gradient
    return passes is not None and passes(call, position)


def may_be_view(operator: str) -> bool:
    """True if an operator's outputs share the memory of its first input, in some layouts."""
    return spec_for(operator).strides is not None


def view_strides(
    call: Call, shape: Shape, strides: Strides, output_shapes: Sequence[Shape]
) -> tuple[Strides, ...] | None:
    """Strides of outputs that share the first input's memory; None if they do not.

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
    """Strides of an output that does not share memory with an input.

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
