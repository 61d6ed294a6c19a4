"""Hooks of schemathesis: half of all cases ask about what is really there.

Loaded by its own command line, with what is there in the variable AUTOSHARD_KNOWN as JSON.
"""

import itertools
import json
import os
import re
from typing import Any

import schemathesis

_KNOWN: dict[str, str] = json.loads(os.environ.get("AUTOSHARD_KNOWN", "{}"))
_DIGEST = re.compile("[0-9a-f]+")
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
    return {name: _known(name, value) for name, value in given.items()}


def _known(name: str, value: Any) -> Any:
    """What is there, in place of a value that could be; what is wrong on purpose stays wrong."""
    known = _KNOWN.get(name)
    if known is None or not isinstance(value, str):
        return value
    is_digest = _DIGEST.fullmatch(known) is not None
    could_be = (
        len(value) == len(known) and _DIGEST.fullmatch(value) if is_digest else value.isidentifier()
    )
    return known if could_be else value
