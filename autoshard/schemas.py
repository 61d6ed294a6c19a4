"""Validators and serializers of types, built on first use: building one takes milliseconds."""

from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")

_ADAPTERS: dict[object, TypeAdapter[Any]] = {}


def type_adapter(kind: type[T]) -> TypeAdapter[T]:
    """The validator and serializer of a type; the same object on each call."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
