"""Sizes as PyTorch writes them down: sympy's `Mul(Integer(2), Symbol('s0', integer=True))`.

They arrive in archives, so they are read and never evaluated as code, and neither they nor what
they amount to may be of any length.
"""

import ast
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from operator import floordiv, mod

from autoshard.errors import GraphError, SchemaError, UnsupportedError

_FUNCTIONS: dict[str, Callable[..., int]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Max": max,
    "Min": min,
    "FloorDiv": floordiv,
    "Mod": mod,
    "PythonMod": mod,
}
"""All of them are defined for integers."""

_LARGEST_POWER = 8
LARGEST = 1 << 63
"""No size is as large."""

_LONGEST = 4000
"""Characters of an expression; the sizes in a deep stack of convolutions take some hundred."""


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """The number that an expression is for some sizes of its symbols.

    Raises:
        UnsupportedError: it uses something other than integers, symbols, and their sums, products,
            powers, quotients, remainders, least and greatest; or it is too long, or too large a
            number.
        SchemaError: it is no expression.
    """
    try:
        return _value(_parsed(text), sizes)
    except GraphError:
        raise
    except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the size {text!r:.80} has no value: {error}") from error


@lru_cache(maxsize=1 << 8)
def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise UnsupportedError(f"the size {text!r:.80} is too long to be followed")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
        raise SchemaError(f"{text!r:.80} is no size") from error


def _value(part: ast.expr, sizes: Mapping[str, int]) -> int:
    number = _number(part, sizes)
    if abs(number) >= LARGEST:
        raise UnsupportedError("a size of 64 bits or more cannot be followed")
    return number


def _number(part: ast.expr, sizes: Mapping[str, int]) -> int:
    match part:
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str(name))]) if name in sizes:
            return sizes[name]
        case ast.Call(ast.Name("Integer"), [number], []):
            return _integer(number)
        case ast.Call(ast.Name("Pow"), [base, ast.Call(ast.Name("Integer"), [exponent])], []):
            power = _integer(exponent)
            if 0 <= power <= _LARGEST_POWER:
                return reduce(lambda x, y: x * y, [_value(base, sizes)] * power, 1)
        case ast.Call(ast.Name(name), parts, []) if name in _FUNCTIONS and parts:
            return _FUNCTIONS[name](*(_value(inner, sizes) for inner in parts))
    raise UnsupportedError(f"the size {ast.unparse(part)!r:.80} cannot be followed")


def _integer(part: ast.expr) -> int:
    match part:
        case ast.Constant(int(number)):
            return int(number)
        case ast.UnaryOp(ast.USub(), ast.Constant(int(number))):
            return -int(number)
    raise UnsupportedError(f"the number {ast.unparse(part)!r:.80} cannot be followed")
