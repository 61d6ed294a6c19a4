"""Which operator has which rule."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from autoshard.errors import SchemaError
from autoshard.graph import CallRule, Graph
from autoshard.ops import (
    attention,
    convolution,
    creation,
    embedding,
    experts,
    indexing,
    loss,
    matmul,
    normalisation,
    pointwise,
    random,
    recurrent,
    reductions,
    views,
)
from autoshard.ops.call import Call, Rule
from autoshard.ops.given import given_rule
from autoshard.ops.rule import OperatorRule
from autoshard.ops.space import replicated

FAMILIES = (
    attention,
    convolution,
    creation,
    embedding,
    experts,
    indexing,
    loss,
    matmul,
    normalisation,
    pointwise,
    random,
    recurrent,
    reductions,
    views,
)

RULES: Mapping[str, Rule] = dict(chain.from_iterable(family.RULES.items() for family in FAMILIES))
"""Rules by operator (`aten.max.dim`), or by packet for all overloads (`aten.add`)."""


def rule_for(call: Call) -> OperatorRule:
    """The rule of a call.

    An operator that has none here has perhaps one that came with the graph. Otherwise it
    runs on whole values, which is right for every deterministic one; every operator of ATen
    that draws random numbers has a rule.

    Raises:
        SchemaError: arguments and shapes contradict each other.
    """
    rule = _lookup(call.operator)
    try:
        if rule is None and call.given is not None:
            return given_rule(call, call.given)
        return (rule or replicated)(call)
    except (LookupError, TypeError, ValueError) as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in call.inputs)
        raise SchemaError(
            f"{call.operator} on shapes {shapes or 'none'} does not fit its schema: {error}"
        ) from error


def has_rule(operator: str) -> bool:
    """Whether an operator has a rule of its own."""
    return _lookup(operator) is not None


def with_rules(graph: Graph, rules: Iterable[CallRule]) -> Graph:
    """A graph with those of some rules that it has use for: its calls have no other rule."""
    by_call = {rule.call: rule for rule in rules}
    used = {rule.call: rule for rule in graph.rules}
    for node in graph.nodes:
        call = graph.call_of(node)
        if call in by_call and not has_rule(node.operator):
            used.setdefault(call, by_call[call])
    return replace(graph, rules=tuple(used.values())) if len(used) > len(graph.rules) else graph


def is_view(operator: str) -> bool:
    """Whether an operator copies nothing: its output is its input, seen differently."""
    return operator in views.VIEWS or _packet(operator) in views.VIEWS


def _lookup(operator: str) -> Rule | None:
    return RULES.get(operator) or RULES.get(_packet(operator))


def _packet(operator: str) -> str:
    return operator.rpartition(".")[0]
