"""A graph as plain JSON, for plan documents and cache keys.

Members that have their default are left out. References read `{"ref": name}`, tokens
`{"dtype": "float32"}`, non-finite floats `{"float": "inf"}`. Arguments are pairs, since not every
store keeps the order of an object's members. What is read may come from a stranger: unknown members
and inexact types are refused, and `autoshard.graph.checks` bounds the rest.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from autoshard.errors import GraphError, SchemaError
from autoshard.graph.checks import check_document, check_rules
from autoshard.graph.ir import CallRule, Graph

T = TypeVar("T")

_GRAPH = TypeAdapter(Graph)
_RULES = TypeAdapter(tuple[CallRule, ...])
_DIGEST = "digest"


def graph_digest(graph: Graph) -> str:
    """SHA-256 of everything in the graph, as 64 hexadecimal digits.

    Names, module paths and tree specs count, because plans repeat them.
    """
    # A graph never changes, so its digest is kept with it, as a cached property would be.
    kept = vars(graph)
    if _DIGEST not in kept:
        kept[_DIGEST] = _document_digest(graph_to_json(graph))
    digest: str = kept[_DIGEST]
    return digest


def _document_digest(document: object) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as an object of plain JSON types; `graph_from_json` reads it back."""
    document: dict[str, Any] = _GRAPH.dump_python(graph, mode="json", exclude_defaults=True)
    return document


def graph_from_json(document: object, *, known: Graph | None = None) -> Graph:
    """Read what `graph_to_json` writes.

    Args:
        document: plain JSON types.
        known: a graph that this may well be; it is returned if it is, which is quicker.

    Raises:
        SchemaError: a member is missing, unknown or mistyped, or the graph is not a program; the
            message names the place.
    """
    if known is not None and _is_document_of(known, document):
        return known
    graph = _read(_GRAPH, document, "a graph")
    check_document(graph, document)
    return graph


def _is_document_of(graph: Graph, document: object) -> bool:
    try:
        return _document_digest(document) == graph_digest(graph)
    except (TypeError, ValueError, RecursionError):  # it is not JSON; reading it says where
        return False


def rules_to_json(rules: Iterable[CallRule]) -> list[dict[str, Any]]:
    """The rules as plain JSON; `rules_from_json` reads them back."""
    document: list[dict[str, Any]] = _RULES.dump_python(
        tuple(rules), mode="json", exclude_defaults=True
    )
    return document


def rules_from_json(document: object) -> tuple[CallRule, ...]:
    """Read what `rules_to_json` writes.

    Raises:
        SchemaError: a member is missing, unknown, mistyped or too large, a rule contradicts
            itself, or two are for the same calls; the message names the place.
    """
    rules = _read(_RULES, document, "rules")
    check_rules(rules)
    return rules


def _read(adapter: TypeAdapter[T], document: object, what: str) -> T:
    try:
        return adapter.validate_json(to_json(document))
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            raise SchemaError(f"{what} must be plain JSON: {error}") from None
        found = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, found["loc"])) or what
        raise SchemaError(f"{place}: {found['msg'].removeprefix('Value error, ')}") from None


def resized(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The program at other sizes than those it was exported with.

    Args:
        graph: the program.
        sizes: numbers by name of the open size; the others stay as they are.

    Raises:
        GraphError: the program has no such open size, or does not allow the number.
    """
    symbols = {symbol.name: symbol for symbol in graph.dynamic.symbols} if graph.dynamic else {}
    for name, number in sizes.items():
        if name not in symbols:
            raise GraphError(f"no size {name!r} was left open; there are {sorted(symbols)}")
        if not symbols[name].allows(number):
            raise GraphError(
                f"size {name!r} was exported for {symbols[name].least} to {symbols[name].most}, "
                f"and is {number}; export again with a wider torch.export.Dim"
            )
    if graph.dynamic is None or not sizes:
        return graph
    numbers = graph.dynamic.planned | dict(sizes)
    return graph_from_json(graph.dynamic.resized(graph_to_json(graph), numbers))
