"""Hooks of schemathesis: half of all cases use ids of existing resources; a check of problems.

Loaded by its command line; the variable AUTOSHARD_KNOWN has the ids as JSON.
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
    """Insert ids of existing resources."""
    return _with_known(parameters)


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Insert digests and ids of existing resources."""
    return _with_known(body) if isinstance(body, dict) else body


@schemathesis.check
def problems_have_request_ids(_context: Any, response: Any, _case: Any) -> None:
    """Compare the `request_id` of a problem with the header of its response."""
    (kind,) = response.headers.get("content-type", [""])
    if kind.startswith("application/problem+json") and response.content:
        (given,) = response.headers["x-request-id"]
        found = response.json().get("request_id")
        if found != given:
            raise AssertionError(f"the request_id is {found!r}, but X-Request-ID is {given!r}")


def _with_known(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or next(_counter) % 2:
        return given
    return {name: _known(name, value) for name, value in given.items()}


def _known(name: str, value: Any) -> Any:
    """An existing id in place of a well-formed one; a malformed value is returned unchanged."""
    known = _KNOWN.get(name)
    if known is None or not isinstance(value, str):
        return value
    is_digest = _DIGEST.fullmatch(known) is not None
    could_be = (
        len(value) == len(known) and _DIGEST.fullmatch(value) if is_digest else value.isidentifier()
    )
    return known if could_be else value
