"""Rules that travel with a graph, as plain JSON.

Dims are texts: `"b"`, `"h d"` for a product of letters, `""` for a dim of size 1. A rule may
come from a stranger and decides how large the planner's problem gets, so it is bounded.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from autoshard.errors import SchemaError
from autoshard.graph.ir import CallRule, DType, Letters, Ref, references
from autoshard.graph.json_fields import (
    check_members,
    code,
    each,
    member,
    pair_from_json,
    place,
    read_each,
    to_json,
    typed,
)

RULES_VERSION = 1
"""Of the rules that `autoshard.discovery` finds; counts up when it looks in another way."""

MAX_RULES = 1024
"""Rules of one graph."""

MAX_LETTERS = 64
"""Letters of a rule; tensors of PyTorch have at most 64 dims."""

MAX_FREE = 16
"""Letters of a rule that may be cut: strategies are their combinations."""

MAX_GROUPS = 8
"""Linear groups of a rule: strategies are combinations of these too."""

MAX_TENSORS = 256
"""Inputs, or outputs, of a rule."""


def rules_to_json(rules: Iterable[CallRule]) -> list[dict[str, Any]]:
    """The rules as plain JSON; `rules_from_json` reads them back."""
    return [_rule_to_json(rule) for rule in rules]


def _rule_to_json(rule: CallRule) -> dict[str, Any]:
    return {
        "operator": rule.operator,
        "arguments": [[name, to_json(value)] for name, value in rule.arguments],
        "dtypes": [dtype.value for dtype in rule.dtypes],
        "sizes": [[letter, size] for letter, size in rule.sizes],
        "inputs": [_dims_to_json(dims) for dims in rule.inputs],
        "outputs": [_dims_to_json(dims) for dims in rule.outputs],
        "contracted": sorted(rule.contracted),
        "whole": sorted(rule.whole),
        "linear": [sorted(group) for group in rule.linear],
        "addends": sorted(rule.addends),
        "unaffected": sorted(rule.unaffected),
        "differentiable": rule.differentiable,
    }


def _dims_to_json(dims: Letters) -> list[str]:
    return [" ".join(letters) for letters in dims]


def rules_from_json(document: object) -> tuple[CallRule, ...]:
    """Read what `rules_to_json` wrote.

    Raises:
        SchemaError: a member is missing, unknown, mistyped or too large, a rule contradicts
            itself, or two are for the same calls; the message names the place.
    """
    items = typed(document, list, "'rules'")
    _check_most(items, MAX_RULES, "rules")
    rules = tuple(read_each(items, _rule_from_json, lambda i, _: f"rules[{i}]"))
    seen = set()
    for i, rule in enumerate(rules):
        if rule.call in seen:
            raise SchemaError(f"rules[{i}]: there are two rules for such calls of {rule.operator}")
        seen.add(rule.call)
    return rules


def _rule_from_json(item: object) -> CallRule:
    check_members(item, _MEMBERS, "a rule")
    arguments = each(item, "arguments", pair_from_json)
    if any(ref.name for _, argument in arguments for ref in references(argument)):
        raise SchemaError("a rule is for calls with any tensors, so its references have no names")
    rule = CallRule(
        operator=member(item, "operator", str),
        arguments=arguments,
        dtypes=tuple(code(DType, text) for text in _texts(item, "dtypes")),
        sizes=each(item, "sizes", _size_from_json),
        inputs=each(item, "inputs", _dims_from_json),
        outputs=each(item, "outputs", _dims_from_json),
        contracted=frozenset(_texts(item, "contracted")),
        whole=frozenset(_texts(item, "whole")),
        linear=each(item, "linear", _positions_from_json),
        addends=_positions_from_json(member(item, "addends", list)),
        unaffected=_positions_from_json(member(item, "unaffected", list)),
        differentiable=member(item, "differentiable", bool),
    )
    with place(rule.operator):
        _check(rule)
    return rule


def _texts(item: object, key: str) -> list[str]:
    return [typed(text, str, f"an item of {key!r}") for text in member(item, key, list)]


def _size_from_json(item: object) -> tuple[str, int]:
    pair = typed(item, list, "a size")
    if len(pair) != len(("letter", "size")):
        raise SchemaError("a size must be a pair of a letter and a number")
    letter, size = typed(pair[0], str, "a letter"), typed(pair[1], int, "a size")
    if not letter.isalnum() or not 0 <= size < _TOO_LARGE:
        raise SchemaError(f"{letter!r} cannot be a letter of size {size}")
    return letter, size


def _dims_from_json(item: object) -> Letters:
    texts = typed(item, list, "the dims of a tensor")
    _check_most(texts, MAX_LETTERS, "dims")
    return tuple(tuple(typed(text, str, "a dim").split()) for text in texts)


def _positions_from_json(item: object) -> frozenset[int]:
    return frozenset(typed(i, int, "a position") for i in typed(item, list, "positions"))


def _check(rule: CallRule) -> None:
    letters = {letter for letter, _ in rule.sizes}
    _check_most(rule.sizes, MAX_LETTERS, "letters")
    _check_most(letters - rule.whole, MAX_FREE, "letters that may be cut")
    _check_most(rule.linear, MAX_GROUPS, "linear groups")
    for listed in (rule.inputs, rule.outputs):
        _check_most(listed, MAX_TENSORS, "tensors")
    if len(letters) < len(rule.sizes):
        raise SchemaError("a letter has two sizes")
    for dims in (*rule.inputs, *rule.outputs):
        used = [letter for dim in dims for letter in dim]
        if len(set(used)) < len(used) or not letters.issuperset(used):
            raise SchemaError(f"a tensor has dims of unknown or repeated letters: {used}")
    if not letters >= rule.contracted | rule.whole:
        raise SchemaError("'contracted' or 'whole' has an unknown letter")
    num_inputs = sum(1 for _, argument in rule.arguments for _ in references(argument))
    if not num_inputs == len(rule.inputs) == len(rule.dtypes):
        raise SchemaError(f"there are {num_inputs} tensors among the arguments, but not as inputs")
    _check_positions((*rule.linear, rule.addends), num_inputs)
    _check_positions((rule.unaffected,), len(rule.outputs))


def _check_positions(groups: Iterable[frozenset[int]], count: int) -> None:
    if any(not 0 <= position < count for group in groups for position in group):
        raise SchemaError(f"a position is not among the {count} tensors")


def _check_most(items: Sequence[object] | set[str], limit: int, what: str) -> None:
    if len(items) > limit:
        raise SchemaError(f"{len(items)} {what} are more than the limit of {limit}")


def anonymous(argument: object) -> Any:
    """An argument with `Ref("")` for every tensor."""
    if isinstance(argument, Ref):
        return Ref("")
    if isinstance(argument, tuple):
        return tuple(anonymous(item) for item in argument)
    return argument


_MEMBERS = frozenset(
    {
        "operator",
        "arguments",
        "dtypes",
        "sizes",
        "inputs",
        "outputs",
        "contracted",
        "whole",
        "linear",
        "addends",
        "unaffected",
        "differentiable",
    }
)
_TOO_LARGE = 1 << 62
