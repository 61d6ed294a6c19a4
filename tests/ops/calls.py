"""Calls of operators with real tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.graph import Argument, DType, Ref, Tensor, Token, TokenKind
from autoshard.graph.experts import EXPERT_OPERATORS
from autoshard.ops import Call
from autoshard.ops.examples import SIZES, examples_of
from autoshard.ops.pointwise import SPECS, pointwise
from autoshard.ops.registry import FAMILIES

MakeExample = Callable[..., Any]
"""The fixture `example`."""
Prove = Callable[..., set[str]]
"""The fixture `prove`."""


class Values:
    """Random tensors from a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def real(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self.generator) + 0.1

    def ids(self, limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(limit, shape, generator=self.generator)


ELEMENTWISE = dict.fromkeys(
    name.split(".")[1]
    for spec in SPECS
    if spec.rule is pointwise
    for name in spec.names
    if name not in {"aten.max.other", "aten.min.other"}
)
"""Packets with overloads that are elementwise, and linear in no input."""


@dataclass(frozen=True)
class Example:
    """A call with real tensors."""

    call: Call
    values: tuple[torch.Tensor, ...]

    @property
    def operator(self) -> Any:
        namespace, packet, overload = self.call.operator.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def run(
        self, values: tuple[torch.Tensor, ...], replaced: Mapping[str, Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        fresh = iter(values)
        arguments = {key: _concrete(value, fresh) for key, value in self.call.arguments}
        return _flat(self.operator(**(arguments | dict(replaced or {}))))


def make_example(operator: str, **arguments: Any) -> Example:
    namespace, packet, overload = operator.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
    names = [argument.name for argument in schema.arguments]
    values: list[torch.Tensor] = []
    ordered = sorted(arguments.items(), key=lambda item: names.index(item[0]))
    abstract = tuple((key, _abstract(value, values)) for key, value in ordered)
    example = Example(Call(operator, abstract, (), ()), tuple(values))
    outputs = example.run(tuple(values))
    call = Call(operator, abstract, tuple(map(spec, values)), tuple(map(spec, outputs)))
    return Example(call, tuple(values))


def spec(tensor: torch.Tensor) -> Tensor:
    dtype = DType(str(tensor.dtype).removeprefix("torch."))
    return Tensor(tuple(tensor.shape), dtype, dtype.is_differentiable)


def _abstract(value: Any, values: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        values.append(value)
        return Ref(f"v{len(values)}")
    if isinstance(value, (list, tuple)):
        return tuple(_abstract(item, values) for item in value)
    if isinstance(value, torch.dtype):
        return Token(TokenKind.DTYPE, str(value).removeprefix("torch."))
    return value


def _concrete(argument: Argument, values: Any) -> Any:
    if isinstance(argument, Ref):
        return next(values)
    if isinstance(argument, tuple):
        return [_concrete(item, values) for item in argument]
    if isinstance(argument, Token):
        return getattr(torch, argument.value)
    return argument


def _flat(outputs: Any) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


SMALL = dict.fromkeys(SIZES, 4) | {"tokens": 8, "slots": 2}
"""A size of each named dim of examples that is small enough to compute with."""

PROVED_ELSEWHERE = {
    "aten._grouped_mm.default": "Its kernel takes long rows of bfloat16 only.",
    "aten.to.dtype": "Sums of bfloat16 are rounded.",
    **dict.fromkeys(EXPERT_OPERATORS, "Sizes of local rows are data, see test_expert_rules."),
}
"""Operators whose examples are not computed with, and why; they have cases of their own."""


def example_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """The examples of all specs but random ones, as operators and real arguments."""
    for spec in (spec for family in FAMILIES for spec in family.SPECS):
        for example in examples_of(spec, SMALL):
            call = example.call
            if spec.draws is None and call.inputs and call.operator not in PROVED_ELSEWHERE:
                values = map(_numbers, call.inputs)
                yield call.operator, {k: _concrete(v, values) for k, v in call.arguments}


def _numbers(tensor: Tensor) -> torch.Tensor:
    """Floating-point numbers between 0.2 and 0.8, or indices below 4 in turn."""
    generator = torch.Generator().manual_seed(4)
    dtype = getattr(torch, tensor.dtype.value)
    if dtype is torch.bool:
        return torch.arange(tensor.numel).reshape(tensor.shape) % 3 != 1
    if not tensor.dtype.is_differentiable:
        return (torch.arange(tensor.numel) % 4).reshape(tensor.shape).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.rand(tensor.shape, generator=generator, dtype=wide) * 0.6 + 0.2
