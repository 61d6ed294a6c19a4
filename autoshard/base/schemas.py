"""Validators and serializers of types, built on first use: building one takes milliseconds."""

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

T = TypeVar("T")

MAX_LISTED_ERRORS = 100
"""Errors of a document that are listed: listing them takes far longer than finding them."""

_ADAPTERS: dict[object, TypeAdapter[Any]] = {}


def type_adapter(kind: type[T]) -> TypeAdapter[T]:
    """The validator and serializer of a type; the same object on each call."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def listed_errors(error: ValidationError) -> list[ErrorDetails]:
    """The errors of a document; none if there are too many to list."""
    if error.error_count() > MAX_LISTED_ERRORS:
        return []
    return error.errors(include_url=False, include_context=False, include_input=False)
