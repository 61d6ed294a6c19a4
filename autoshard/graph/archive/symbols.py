"""Symbolic sizes and numbers of an export, replaced by their hints: the values of the example."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.errors import SchemaError, UnsupportedError
from autoshard.graph.json_fields import member, typed, union
from autoshard.graph.sizes.expressions import Number

_TABLES = ("sym_int_values", "sym_float_values", "sym_bool_values")
_LITERALS: dict[str, type[Number]] = {"as_int": int, "as_float": float, "as_bool": bool}


@dataclass(frozen=True, slots=True)
class Symbols:
    """Values of symbolic names.

    Attributes:
        hints: value of each name; None if the export recorded none.
    """

    hints: Mapping[str, Number | None]

    @classmethod
    def of(cls, graph: object, outer: "Symbols | None" = None) -> "Symbols":
        """Symbols of a JSON graph, including those of the enclosing graph."""
        hints: dict[str, Number | None] = dict(outer.hints) if outer else {}
        for table in _TABLES:
            values = typed(graph, dict, "the graph").get(table) or {}
            for name, value in typed(values, dict, repr(table)).items():
                hints[name] = symbolic(value)
        return cls(hints)

    def resolve(self, argument: object) -> Number:
        """Value of a symbolic argument: a name or a literal."""
        tag, payload = union(argument, "a symbolic argument")
        if tag != "as_name":
            return literal(tag, payload)
        name = typed(payload, str, "'as_name'")
        if name not in self.hints:
            raise SchemaError(f"symbol {name!r} is not defined")
        hint = self.hints[name]
        if hint is None:
            raise UnsupportedError(
                f"the number {name!r} depends on the data, so sizes that use it are unknown; "
                "export with static shapes, and without .item() in the model"
            )
        return hint


def size(value: object) -> int:
    """Read a size in model.json: a literal, or the hint of an expression.

    Raises:
        UnsupportedError: the expression has no hint.
        SchemaError: it is not a size.
    """
    if isinstance(value, dict) and len(value) == 1:
        # Fast path: nearly all sizes are literals.
        plain = value.get("as_int")
        if type(plain) is int and plain >= 0:
            return plain
    number = symbolic(value)
    if number is None:
        raise UnsupportedError(
            "a size depends on the data or was exported without a hint; export with static "
            "shapes, or with torch.export.Dim and example inputs"
        )
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise SchemaError(f"a size must be a non-negative integer, not {number!r}")
    return number


def symbolic(value: object) -> Number | None:
    """Value of a SymInt, SymFloat or SymBool; None for an expression without a hint."""
    tag, payload = union(value, "a symbolic number")
    if tag != "as_expr":
        return literal(tag, payload)
    member(payload, "expr_str", str)
    hint = payload.get("hint")
    return None if hint is None else literal(*union(hint, "'hint'"))


def literal(tag: str, payload: object) -> Number:
    """Value of an as_int, as_float or as_bool member."""
    kind = _LITERALS.get(tag)
    if kind is None:
        raise SchemaError(f"unknown kind of number {tag!r}")
    if kind is float:
        return to_float(payload)
    return typed(payload, kind, repr(tag))


def to_float(payload: object) -> float:
    """Read a float of model.json, where non-finite floats are strings."""
    spelled = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
    if isinstance(payload, str) and payload in spelled:
        return spelled[payload]
    if isinstance(payload, bool) or not isinstance(payload, int | float):
        raise SchemaError(f"'as_float' must be a number, not {payload!r}")
    return float(payload)
