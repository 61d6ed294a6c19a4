"""Which operator has which rule."""

from collections.abc import Mapping
from itertools import chain

from autoshard.errors import SchemaError
from autoshard.rules import (
    attention,
    convolution,
    creation,
    embedding,
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
from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import replicated

FAMILIES = (
    attention,
    convolution,
    creation,
    embedding,
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

    An operator that has none runs on whole values, which is right for every deterministic
    one; every operator of ATen that draws random numbers has a rule.

    Raises:
        SchemaError: arguments and shapes contradict each other.
    """
    rule = _lookup(call.operator) or replicated
    try:
        return rule(call)
    except (LookupError, TypeError, ValueError) as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in call.inputs)
        raise SchemaError(
            f"{call.operator} on shapes {shapes or 'none'} does not fit its schema: {error}"
        ) from error


def has_rule(operator: str) -> bool:
    """Whether an operator has a rule of its own."""
    return _lookup(operator) is not None


def is_view(operator: str) -> bool:
    """Whether an operator copies nothing: its output is its input, seen differently."""
    return operator in views.VIEWS or _packet(operator) in views.VIEWS


def _lookup(operator: str) -> Rule | None:
    return RULES.get(operator) or RULES.get(_packet(operator))


def _packet(operator: str) -> str:
    return operator.rpartition(".")[0]
