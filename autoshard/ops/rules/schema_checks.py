"""Arguments of a call, compared with the operator's schema before any kernel runs.

A program may come from a document that nobody wrote with care, and not every kernel checks what it
gets.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import FunctionSchema

from autoshard.errors import PlanError
from autoshard.graph import Argument, Node, Ref, Token, TokenKind

_TOKENS = {
    "DeviceObjType": TokenKind.DEVICE,
    "LayoutType": TokenKind.LAYOUT,
    "MemoryFormatType": TokenKind.MEMORY_FORMAT,
    "ScalarTypeType": TokenKind.DTYPE,
}
_ENUMERATIONS = {
    ("embedding_bag", "mode"): 3,
    ("_embedding_bag", "mode"): 3,
    ("grid_sampler", "interpolation_mode"): 3,
    ("grid_sampler", "padding_mode"): 3,
}
"""Number of values of integers that stand for a choice, by packet and argument."""
_NUM_REDUCTIONS = 3
"""Values of `reduction` of every loss: none, mean and sum."""
_INT64 = 1 << 63


def check_against_schema(
    node: Node, schema: FunctionSchema, replaced: Mapping[str, Argument] | None = None
) -> None:
    """Check that a schema takes the arguments of a call.

    Args:
        node: the call.
        schema: of its operator.
        replaced: arguments that differ from those of the call.

    Raises:
        PlanError: an argument is missing or unknown, is of another type, is a list of another
            length, or is no value of an enumeration.
    """
    given = {**dict(node.arguments), **(replaced or {})}
    for argument in schema.arguments:
        if argument.name not in given:
            if argument.has_default_value():
                continue
            raise PlanError(f"node {node.name!r}: {node.operator} needs {argument.name!r}")
        value = given.pop(argument.name)
        if not _fits(value, argument.real_type, argument) or not _is_listed(value, argument, node):
            raise PlanError(
                f"node {node.name!r}: {node.operator} takes {argument.name!r} as "
                f"{_described(argument, node)}, not {value!r:.80}"
            )
    if given:
        raise PlanError(f"node {node.name!r}: {node.operator} has no argument {min(given)!r}")


def _fits(value: Argument, kind: Any, argument: Any) -> bool:
    """True if a value is of a type; `argument` has the length of lists."""
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(value, kind.getElementType(), argument)
    if name == "ListType":
        return _fits_list(value, kind.getElementType(), argument)
    if name in _TOKENS:
        return isinstance(value, Token) and value.kind is _TOKENS[name]
    return name in _PLAIN and _PLAIN[name](value)


def _is_integer(value: Argument) -> bool:
    return isinstance(value, int) and -_INT64 <= value < _INT64


def _is_number(value: Argument) -> bool:
    return isinstance(value, float) or _is_integer(value)


_PLAIN: Mapping[str, Callable[[Argument], bool]] = {
    # A number becomes a tensor.
    "TensorType": lambda value: isinstance(value, Ref) or _is_number(value),
    "IntType": _is_integer,
    "SymIntType": _is_integer,
    "FloatType": _is_number,
    "NumberType": _is_number,
    "BoolType": lambda value: isinstance(value, int) and value in (0, 1),
    "StringType": lambda value: isinstance(value, str),
    "GeneratorType": lambda value: value is None,
}
"""Predicates of types that are neither lists nor named objects; of others no value is taken."""


def _fits_list(value: Argument, element: Any, argument: Any) -> bool:
    if not isinstance(value, tuple):  # one number stands for a list of a known length
        return argument.N is not None and _fits(value, element, argument)
    return _has_length(value, element, argument) and all(
        _fits(item, element, argument) for item in value
    )


def _has_length(value: Sequence[Argument], element: Any, argument: Any) -> bool:
    """True if a list has the length of the schema, one element for all, or the default's length."""
    if argument.N is None or argument.N == 1:
        return True
    lengths = {argument.N}
    if element.kind() != "BoolType":
        default = argument.default_value if argument.has_default_value() else None
        lengths |= {1, len(default) if isinstance(default, list) else 1}
    return len(value) in lengths


def _num_choices(argument: Any, node: Node) -> int | None:
    if argument.name == "reduction" and argument.real_type.kind() == "IntType":
        return _NUM_REDUCTIONS
    return _ENUMERATIONS.get((node.operator.split(".")[1], argument.name))


def _is_listed(value: Argument, argument: Any, node: Node) -> bool:
    count = _num_choices(argument, node)
    return count is None or (isinstance(value, int) and 0 <= value < count)


def _described(argument: Any, node: Node) -> str:
    count = _num_choices(argument, node)
    length = f" of length {argument.N}" if argument.N else ""
    return f"{argument.real_type}{length}" if count is None else f"a number from 0 to {count - 1}"
