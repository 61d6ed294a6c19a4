"""Symbolic sizes of an export, evaluated at given sizes or replaced by their hints.

PyTorch writes them in sympy's notation: `Mul(Integer(2), Symbol('s0', integer=True))`. They come
from untrusted archives, so they are parsed and never executed, and their length and values are
limited.
"""

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import floordiv, mod

from autoshard.errors import GraphError, SchemaError, UnsupportedError
from autoshard.graph.json_fields import member, typed, union

_FUNCTIONS: dict[str, Callable[..., int]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Max": max,
    "Min": min,
    "FloorDiv": floordiv,
    "Mod": mod,
    "PythonMod": mod,
}
"""Functions of integers that expressions may use."""

_MAX_POWER = 8
SIZE_LIMIT = 1 << 63
"""Upper limit (exclusive) of sizes."""

_MAX_LENGTH = 4000
"""Maximum characters of an expression; sizes in deep stacks of convolutions need some hundred."""


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """Evaluate an expression for given sizes of its symbols.

    Raises:
        UnsupportedError: it uses something other than integers, symbols, sums, products, powers,
            quotients, remainders, minimum and maximum; or it is too long or its value too large.
        SchemaError: it is not a valid expression.
    """
    try:
        return _value(_parsed(text), sizes)
    except GraphError:
        raise
    except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the size {text!r:.80} has no value: {error}") from error


@lru_cache(maxsize=1 << 8)
def _parsed(text: str) -> ast.expr:
    if len(text) > _MAX_LENGTH:
        raise UnsupportedError(f"the size {text!r:.80} is too long")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
        raise SchemaError(f"{text!r:.80} is not a size") from error


def _value(part: ast.expr, sizes: Mapping[str, int]) -> int:
    number = _number(part, sizes)
    if abs(number) >= SIZE_LIMIT:
        raise UnsupportedError("sizes of 64 bits or more are not supported")
    return number


def _number(part: ast.expr, sizes: Mapping[str, int]) -> int:
    match part:
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str(name))]) if name in sizes:
            return sizes[name]
        case ast.Call(ast.Name("Integer"), [number], []):
            return _integer(number)
        case ast.Call(ast.Name("Pow"), [base, ast.Call(ast.Name("Integer"), [exponent])], []):
            power = _integer(exponent)
            if 0 <= power <= _MAX_POWER:
                return reduce(lambda x, y: x * y, [_value(base, sizes)] * power, 1)
        case ast.Call(ast.Name(name), parts, []) if name in _FUNCTIONS and parts:
            return _FUNCTIONS[name](*(_value(inner, sizes) for inner in parts))
    raise UnsupportedError(f"the size {ast.unparse(part)!r:.80} is not supported")


def _integer(part: ast.expr) -> int:
    match part:
        case ast.Constant(int(number)):
            return int(number)
        case ast.UnaryOp(ast.USub(), ast.Constant(int(number))):
            return -int(number)
    raise UnsupportedError(f"the number {ast.unparse(part)!r:.80} is not supported")


Number = bool | int | float

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
