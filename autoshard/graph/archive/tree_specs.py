"""Nesting of the arguments and results of a program, as JSON: which can be read safely.

A plan may come from a server, so it must not choose what is imported. Reading a program checks its
nesting, and so does applying a plan, which need not come from a program that was read here.
"""

import json
from collections.abc import Iterator
from typing import Any

from autoshard.errors import SchemaError, UnsupportedError

_IMPORTING_TYPES = frozenset({"collections.defaultdict"})
_IMPORTING_CONTEXT = "__enum__"
"""Tree specs with these make PyTorch import modules by name."""


def spec_nodes(text: str) -> tuple[dict[str, Any], ...]:
    """The nodes of a tree spec that `treespec_dumps` wrote, which may be empty.

    Raises:
        SchemaError: it is malformed.
        UnsupportedError: it cannot be read without importing what it names.
    """
    if not text:
        return ()
    try:
        _, schema = json.loads(text)
        nodes = tuple(_nodes(schema))
        contexts = [json.dumps(node["context"]) for node in nodes]
        types = [str(node["type"]) for node in nodes]
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaError(f"the tree spec cannot be read: {error}") from None
    for kind, context in zip(types, contexts, strict=True):
        if kind in _IMPORTING_TYPES or _IMPORTING_CONTEXT in context:
            raise UnsupportedError(
                f"arguments or results nest in {kind}, which a plan cannot read safely; export "
                f"the model with plain dicts instead"
            )
    return nodes


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    yield schema
    for child in schema["children_spec"]:
        yield from _nodes(child)
