"""Serialisation of graphs as plain JSON, for plan documents and cache keys.

Members with their default value are left out. References are `{"ref": name}`, tokens
`{"dtype": "float32"}`, non-finite floats `{"float": "inf"}`. Arguments are pairs, since not every
store preserves the order of an object's members. Input is untrusted: unknown members and inexact
types are errors, and `autoshard.graph.checks` enforces limits.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from autoshard.base.integers import check_integers
from autoshard.base.memo import kept_in_argument
from autoshard.base.schemas import type_adapter
from autoshard.errors import GraphError, SchemaError
from autoshard.graph.checks import check_document, check_rules
from autoshard.graph.ir import CallRule, Graph

T = TypeVar("T")


@kept_in_argument
def graph_digest(graph: Graph) -> str:
    """SHA-256 of the graph's JSON, as 64 hexadecimal digits.

    It includes names, module paths and tree specs, because plans contain them.
    """
    return _document_digest(graph_to_json(graph))


def _document_digest(document: object) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Convert a graph to plain JSON types, the inverse of `graph_from_json`."""
    document: dict[str, Any] = type_adapter(Graph).dump_python(
        graph, mode="json", exclude_defaults=True
    )
    return document


def graph_from_json(document: object, *, known: Graph | None = None) -> Graph:
    """Parse the JSON of a graph, as `graph_to_json` writes it.

    Args:
        document: plain JSON types.
        known: a graph that is returned without parsing if its digest equals the document's.

    Raises:
        SchemaError: a member is missing, unknown or mistyped, or the graph is invalid; the message
            has its path.
    """
    if known is not None and _is_document_of(known, document):
        return known
    graph = _read(type_adapter(Graph), document, "a graph")
    check_document(graph, document)
    return graph


def _is_document_of(graph: Graph, document: object) -> bool:
    try:
        return _document_digest(document) == graph_digest(graph)
    except (TypeError, ValueError, RecursionError):  # not JSON; parsing reports the error
        return False


def rules_to_json(rules: Iterable[CallRule]) -> list[dict[str, Any]]:
    """Convert rules to plain JSON, the inverse of `rules_from_json`."""
    document: list[dict[str, Any]] = type_adapter(tuple[CallRule, ...]).dump_python(
        tuple(rules), mode="json", exclude_defaults=True
    )
    return document


def rules_from_json(document: object) -> tuple[CallRule, ...]:
    """Parse the JSON of rules, as `rules_to_json` writes it.

    Raises:
        SchemaError: a member is missing, unknown, mistyped or too large, a rule is inconsistent,
            or two are for the same calls; the message has its path.
    """
    rules = _read(type_adapter(tuple[CallRule, ...]), document, "rules")
    check_rules(rules)
    return rules


def _read(adapter: TypeAdapter[T], document: object, what: str) -> T:
    try:
        text = to_json(document)
        check_integers(text, document, SchemaError, what)
        return adapter.validate_json(text)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        if isinstance(error, SchemaError):
            raise
        if not isinstance(error, ValidationError):
            raise SchemaError(f"{what} must be plain JSON: {error}") from None
        found = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, found["loc"])) or what
        raise SchemaError(f"{place}: {found['msg'].removeprefix('Value error, ')}") from None


def resized(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """Return the program at other sizes than those of its example inputs.

    Args:
        graph: the program.
        sizes: new values of dynamic sizes by name; the others do not change.

    Raises:
        GraphError: the program has no such dynamic size, or does not support the value.
    """
    known = graph.dynamic.planned if graph.dynamic else {}
    for name in sizes:
        if name not in known:
            raise GraphError(
                f"there is no dynamic size {name!r}; the dynamic sizes are {sorted(known)}"
            )
    if graph.dynamic is None or not sizes:
        return graph
    graph.dynamic.check(known | dict(sizes))
    return graph_from_json(graph.dynamic.resized(graph_to_json(graph), known | dict(sizes)))
