"""How arguments and results nest: PyTorch's tree specs, read without running anything."""

import json
from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree as pytree

from autoshard.errors import PlanError

TreeSpec = pytree.TreeSpec

_IMPORTING_TYPES = frozenset({"collections.defaultdict"})
_IMPORTING_CONTEXT = "__enum__"
"""What makes PyTorch import modules by name while it reads a spec. A plan may come from a
server, so it does not get to choose what is imported."""


def read_spec(text: str) -> TreeSpec:
    """Read a tree spec as `treespec_dumps` writes it.

    Raises:
        PlanError: it is malformed, or names a type that nobody registered here.
    """
    try:
        _, schema = json.loads(text)
        for node in _nodes(schema):
            context = json.dumps(node["context"])
            if node["type"] in _IMPORTING_TYPES or _IMPORTING_CONTEXT in context:
                raise PlanError(
                    f"the plan's arguments or results nest in {node['type']}, which cannot be "
                    f"read safely; export the model with plain dicts instead"
                )
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise PlanError(
            f"{error}; import the module that defines this type before applying the plan"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"the plan's tree spec cannot be read: {error}") from None


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    yield schema
    for child in schema["children_spec"]:
        yield from _nodes(child)
