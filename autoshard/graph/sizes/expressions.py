"""Expressions of dynamic sizes, evaluated at given sizes.

PyTorch writes the numbers of a program in sympy's notation (`Mul(Integer(2), Symbol('s0'))`), and
the conditions of an export in Python's (`Symbol('s0') % 2 == 0`). They come from untrusted
archives and plans, so they are parsed and never executed, and their length and values are limited.
"""

import ast
import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, reduce

from autoshard.errors import GraphError, SchemaError, UnsupportedError

Number = bool | int | float

Polynomial = Mapping[tuple[str, ...], int]
"""Coefficient of each product of names."""

SIZE_LIMIT = 1 << 63
"""Upper limit (exclusive) of sizes."""

MAX_FACTORS = 2
"""Maximum number of names in a product of a polynomial, such as batch times sequence."""

_MAX_LENGTH = 4000
"""Maximum characters of an expression; sizes in deep stacks of convolutions need some hundred."""
_MAX_BITS = 63
_MAX_TERMS = 64
"""Maximum number of products of a polynomial."""


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and (exponent < 0 or (abs(base) > 1 and exponent > _MAX_BITS)):
        raise UnsupportedError("sizes of 64 bits or more are not supported")
    made: Number = base**exponent
    return made


def _shift(number: Number, bits: Number) -> Number:
    if not 0 <= bits <= _MAX_BITS:
        raise UnsupportedError("sizes of 64 bits or more are not supported")
    return int(number) << int(bits)


def _rounded(number: Number, digits: Number | None = None) -> Number:
    if digits is None:
        return round(number)
    # Python computes 10 to the power of the digits of an integer.
    if not -_MAX_BITS <= digits <= _MAX_BITS:
        raise UnsupportedError(f"numbers are rounded to at most {_MAX_BITS} digits")
    return round(number, int(digits))


_BINARY: Mapping[str, Callable[..., Number]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": _power,
    "LShift": _shift,
    "RShift": operator.rshift,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
}
_COMPARISONS: Mapping[str, Callable[..., bool]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}
_UNARY: Mapping[str, Callable[..., Number]] = {
    "USub": operator.neg,
    "UAdd": operator.pos,
    "Not": operator.not_,
}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Pow": _power,
    "PowByNatural": _power,
    "FloatPow": lambda base, exponent: _power(float(base), float(exponent)),
    "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda number, divisor: -(-number // divisor),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda number, divisor, modulus: number // divisor % modulus,
    "LShift": _shift,
    "RShift": operator.rshift,
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
    "Abs": abs,
    "ToFloat": float,
    "TruncToFloat": lambda number: float(math.trunc(number)),
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "ceiling": math.ceil,
    "RoundToInt": round,
    "RoundDecimal": _rounded,
    "Identity": lambda number: number,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": lambda *flags: all(flags),
    "Or": lambda *flags: any(flags),
    "Not": operator.not_,
    "Max": max,
    "Min": min,
    # Python's notation.
    "abs": abs,
    "ceil": math.ceil,
    "float": float,
    "floor": math.floor,
    "max": max,
    "min": min,
    "round": _rounded,
    "sym_float": float,
    "sym_int": math.trunc,
    "sym_ite": lambda condition, one, other: one if condition else other,
    "sym_max": max,
    "sym_min": min,
    "sym_not": operator.not_,
    "trunc": math.trunc,
    "_sym_sqrt": math.sqrt,
    **{
        f"{prefix}{name}": getattr(math, name)
        for prefix in ("", "OpaqueUnaryFn_")
        for name in (
            *("acos", "asin", "asinh", "atan", "cos", "cosh", "exp", "log", "log2", "sin"),
            *("sinh", "sqrt", "tan", "tanh"),
        )
    },
}
"""Functions that expressions may call; torch's stand for those of Python on sizes."""
_SYNTAX = frozenset({"ExprCondPair", "Float", "Integer", "Piecewise", "Symbol", "Where"})
_CONSTANTS: Mapping[str, bool] = {"true": True, "false": False, "True": True, "False": False}
_NO_VALUE = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError)


def evaluate(text: str, sizes: Mapping[str, Number]) -> Number:
    """Evaluate an expression for given sizes of its symbols.

    Raises:
        UnsupportedError: it uses something other than numbers, symbols and known functions; or it
            is too long or its value too large.
        SchemaError: it is not a valid expression, or has no value for these sizes.
    """
    try:
        return _value(parsed(text), sizes)
    except GraphError:
        raise
    except _NO_VALUE as error:
        raise SchemaError(f"the size {text!r:.80} has no value: {error}") from error


@lru_cache(maxsize=1 << 10)
def parsed(text: str) -> ast.expr:
    """Parse an expression.

    Raises:
        UnsupportedError: it is too long.
        SchemaError: it is not an expression.
    """
    if len(text) > _MAX_LENGTH:
        raise UnsupportedError(f"the size {text!r:.80} is too long")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
        raise SchemaError(f"{text!r:.80} is not a size") from error


def unknown_functions(text: str) -> list[str]:
    """Functions of an expression that cannot be evaluated, sorted.

    Raises:
        GraphError: as for `parsed`.
    """
    calls = (part for part in ast.walk(parsed(text)) if isinstance(part, ast.Call))
    names = {_function_of(call) for call in calls}
    return sorted(names - _FUNCTIONS.keys() - _SYNTAX)


def symbols_in(text: str) -> Iterator[str]:
    """Names of the symbols of an expression.

    Raises:
        GraphError: as for `parsed`.
    """
    for part in ast.walk(parsed(text)):
        match part:
            case ast.Call(ast.Name("Symbol"), [ast.Constant(str(name))]):
                yield name


def shortened(part: ast.expr) -> str:
    """Text of an expression without the assumptions of its symbols and the precision of numbers."""
    return ast.unparse(_Shortening().visit(copy.deepcopy(part)))


class _Shortening(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _SYNTAX:
            node.keywords = []
        return node


def expand(text: str) -> Polynomial:
    """An integer expression as a polynomial in its symbols, and in parts that are none.

    Symbols have their names, and other parts, such as `FloorDiv(Symbol('s0'), Integer(2))`, are
    named by their own text.

    Raises:
        GraphError: as for `parsed`.
    """
    try:
        return _expanded(parsed(text))
    except RecursionError as error:
        raise SchemaError(f"the size {text!r:.80} is nested too deeply") from error


def _value(part: ast.expr, sizes: Mapping[str, Number]) -> Number:
    number = _number(part, sizes)
    if isinstance(number, int):
        if abs(number) >= SIZE_LIMIT:
            raise UnsupportedError("sizes of 64 bits or more are not supported")
    elif isinstance(number, complex) or not math.isfinite(number):
        raise UnsupportedError("only finite real numbers are supported")
    return number


def _number(part: ast.expr, sizes: Mapping[str, Number]) -> Number:
    match part:
        case ast.Call():
            return _called(part, sizes)
        case ast.UnaryOp(sign, inner):
            return _UNARY[type(sign).__name__](_value(inner, sizes))
        case ast.BinOp(left, sign, right):
            return _BINARY[type(sign).__name__](_value(left, sizes), _value(right, sizes))
        case ast.Compare() | ast.BoolOp():
            return _is_true(part, sizes)
        case ast.IfExp(condition, one, other):
            return _value(one if _value(condition, sizes) else other, sizes)
    return _constant(part)


def _constant(part: ast.expr) -> Number:
    match part:
        case ast.Constant(bool() | int() | float() as number):
            return number
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
    raise _unsupported(part)


def _called(call: ast.Call, sizes: Mapping[str, Number]) -> Number:
    name = _function_of(call)
    match call:
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str(symbol))]) if symbol in sizes:
            return sizes[symbol]
        case ast.Call(ast.Name("Integer"), [number], []):
            return _integer(number)
        case ast.Call(ast.Name("Float"), [ast.Constant(str(digits))]):
            return float(digits)
        case ast.Call(ast.Name("Piecewise"), cases, []) if cases:
            return _piecewise(cases, sizes)
        case ast.Call(ast.Name("Where"), [condition, one, other], []):
            return _value(one if _value(condition, sizes) else other, sizes)
        case ast.Call(_, parts, []) if name in _FUNCTIONS and parts:
            return _FUNCTIONS[name](*(_value(inner, sizes) for inner in parts))
    raise _unsupported(call)


def _function_of(call: ast.Call) -> str:
    """Name of the called function; of a method of `math` or `torch`, without them."""
    match call.func:
        case ast.Name(name) | ast.Attribute(ast.Name("math" | "torch"), name):
            return name
    return ast.unparse(call.func)


def _piecewise(cases: Iterable[ast.expr], sizes: Mapping[str, Number]) -> Number:
    for part in cases:
        match part:
            case ast.Call(ast.Name("ExprCondPair"), [value, condition], []):
                if _value(condition, sizes):
                    return _value(value, sizes)
            case _:
                raise _unsupported(part)
    raise SchemaError("no case of a Piecewise applies")


def _is_true(part: ast.Compare | ast.BoolOp, sizes: Mapping[str, Number]) -> bool:
    if isinstance(part, ast.BoolOp):
        flags = (bool(_value(inner, sizes)) for inner in part.values)
        return all(flags) if isinstance(part.op, ast.And) else any(flags)
    numbers = [_value(inner, sizes) for inner in (part.left, *part.comparators)]
    return all(
        _COMPARISONS[type(sign).__name__](one, other)
        for sign, one, other in zip(part.ops, numbers, numbers[1:], strict=False)
    )


def _integer(part: ast.expr) -> int:
    match part:
        case ast.Constant(int(number)):
            return int(number)
        case ast.UnaryOp(ast.USub(), ast.Constant(int(number))):
            return -int(number)
    raise UnsupportedError(f"the number {ast.unparse(part)!r:.80} is not supported")


def _unsupported(part: ast.expr) -> UnsupportedError:
    return UnsupportedError(f"the size {ast.unparse(part)!r:.80} is not supported")


def _expanded(part: ast.expr) -> Polynomial:
    match part:
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str(name))]):
            return {(name,): 1}
        case ast.Call(ast.Name("Integer"), [number], []):
            return {(): _integer(number)}
        case ast.Call(ast.Name("Add"), parts, []):
            return _sum(map(_expanded, parts))
        case ast.Call(ast.Name("Mul"), parts, []):
            one: Polynomial = {(): 1}
            product = reduce(_product, map(_expanded, parts), one)
            if all(_is_simple(names) for names in product) and len(product) <= _MAX_TERMS:
                return product
    return {(shortened(part),): 1}


def _sum(polynomials: Iterable[Polynomial]) -> Polynomial:
    total: dict[tuple[str, ...], int] = {}
    for polynomial in polynomials:
        for names, factor in polynomial.items():
            total[names] = total.get(names, 0) + factor
    return total


def _product(one: Polynomial, other: Polynomial) -> Polynomial:
    if len(one) * len(other) > _MAX_TERMS:
        return {("", "", ""): 1}  # too many: not simple
    return _sum({tuple(sorted((*a, *b))): x * y} for a, x in one.items() for b, y in other.items())


def _is_simple(names: tuple[str, ...]) -> bool:
    """True if a product has few factors, all different."""
    return len(names) <= MAX_FACTORS and len(set(names)) == len(names)
