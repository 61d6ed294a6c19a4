"""Calls of operators with real tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.graph import Argument, DType, Ref, Tensor, Token, TokenKind
from autoshard.ops import (
    Call,
)


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
