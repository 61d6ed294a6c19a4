"""The examples of operators: calls written with named dims, from which pages and tests are made.

A line such as `conv2d.default: input[b,i,x,y] weight[o,i,3,3] padding=(1,1) -> [b,o,x,y]` has

* the operator, if it is not the first one of the spec;
* tensors by schema name, `ids:int64[b,s]` with another element type than float32, `tensors*[b,s]`
  as one of a list. A dim is a name, a product of names such as `(g c)`, a number, or `s+1`;
* other arguments: Python literals, element types, and named dims or products of them (`b*s`);
* the outputs.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from string import ascii_lowercase

from autoshard.graph import Argument, DType, Ref, Tensor, Token, TokenKind
from autoshard.ops.rules.spec import Call, OperatorSpec

_PRIMES = "3 5 7 11 13 17 19 23 29 31 37 41 43 47 53 59 61 67 71 73 79 83 89 97 101 103"
_ROUTED = {"tokens": 512, "slots": 4, "experts": 16, "share": 128}
SIZES: Mapping[str, int] = _ROUTED | {
    name: 16 * int(prime) for name, prime in zip(ascii_lowercase, _PRIMES.split(), strict=True)
}
"""Size of each named dim: divisible by 16, as some kernels require, and otherwise coprime; of a
mixture of experts there are as many slots of tokens as rows of experts."""

_TENSOR = re.compile(r"(\w*)(\*?):?(\w*)\[([^\]]*)\]")
_ARGUMENT = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
        text: the line without the operator.
        call: the call.
        dims: names of the factors of each dim of each tensor, inputs before outputs.
    """

    text: str
    call: Call
    dims: list[list[list[str]]]


def examples_of(spec: OperatorSpec, sizes: Mapping[str, int] = SIZES) -> Iterator[Example]:
    """The examples of a spec.

    Args:
        spec: the spec.
        sizes: size of each named dim.

    Raises:
        KeyError: a dim has a name without a size.
    """
    for line in filter(None, map(str.strip, spec.examples.splitlines())):
        operator, colon, text = line.partition(": ")
        name = f"aten.{operator}" if colon else spec.names[0]
        inputs, _, outputs = (text if colon else line).partition("-> ")
        made = _TENSOR.findall(outputs)
        taken = _TENSOR.findall(_ARGUMENT.sub("", inputs))
        arguments: dict[str, Argument] = {}
        for (key, listed), group in groupby((key, bool(star)) for key, star, _, _ in taken):
            count = len(list(group))
            arguments[key] = (Ref(key),) * count if listed else Ref(key)
        for key, value in _ARGUMENT.findall(inputs):
            arguments[key] = _argument(ast.parse(value, mode="eval").body, sizes)
        tensors = [_tensor(kind, dims, sizes) for _, _, kind, dims in (*taken, *made)]
        shapes, dims = zip(*tensors, strict=True)
        call = Call(name, tuple(arguments.items()), shapes[: len(taken)], shapes[len(taken) :])
        yield Example(" ".join((text if colon else line).split()), call, list(dims))


def _tensor(kind: str, text: str, sizes: Mapping[str, int]) -> tuple[Tensor, list[list[str]]]:
    dims = [dim.strip("()").split() for dim in text.split(",") if dim]
    shape = tuple(prod(_size(factor, sizes) for factor in dim) for dim in dims)
    dtype = DType(kind or "float32")
    return Tensor(shape, dtype, dtype.is_differentiable), dims


def _size(factor: str, sizes: Mapping[str, int]) -> int:
    name, _, more = factor.partition("+")
    return (int(name) if name.isdigit() else sizes[name]) + int(more or 0)


def _argument(node: ast.expr, sizes: Mapping[str, int]) -> Argument:
    match node:
        case ast.Name(name):
            return sizes[name] if name in sizes else Token(TokenKind.DTYPE, name)
        case ast.Tuple(items):
            return tuple(_argument(item, sizes) for item in items)
        case ast.BinOp(left, ast.Mult(), right):
            return prod(
                sizes[factor.id] for factor in (left, right) if isinstance(factor, ast.Name)
            )
    literal: Argument = ast.literal_eval(node)
    return literal
