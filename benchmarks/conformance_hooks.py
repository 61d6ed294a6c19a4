"""Hooks of schemathesis: half of all cases ask about what is really there.

Loaded by its own command line, with what is there in the variable AUTOSHARD_KNOWN as JSON.
"""

import itertools
import json
import os
from typing import Any

import schemathesis

_KNOWN: dict[str, str] = json.loads(os.environ.get("AUTOSHARD_KNOWN", "{}"))
_counter = itertools.count()


@schemathesis.hook
def map_path_parameters(_context: Any, parameters: dict[str, Any] | None) -> Any:
    """Ids of what is there."""
    return _with_known(parameters)


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Digests and ids of what is there."""
    return _with_known(body) if isinstance(body, dict) else body


def _with_known(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or next(_counter) % 2:
        return given
    return {name: _KNOWN.get(name, value) for name, value in given.items()}
