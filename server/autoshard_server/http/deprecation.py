"""Headers of responses to requests that use what will be removed (RFC 9745, RFC 8594)."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

_SINCE = "@1796083200"
"""1 December 2026, when options got groups, and explanations were asked for with POST."""
_REMOVED = "Tue, 01 Jun 2027 00:00:00 GMT"
"""Earliest time at which options without groups, and GET of an explanation, are refused."""
_NAMES = "deprecated_names"
_SUCCESSOR = "successor"


def note_deprecated(request: Request, names: Mapping[str, str]) -> None:
    """Remember what a request uses that will be removed, for the headers of its response.

    Args:
        request: of the caller.
        names: of options outside of their groups, with what replaces each.
    """
    if names:
        setattr(request.state, _NAMES, names)


def note_deprecated_route(request: Request, successor: str) -> None:
    """Remember that a route will be removed, for the headers of its response.

    Args:
        request: of the caller.
        successor: path of what replaces the route.
    """
    setattr(request.state, _SUCCESSOR, successor)


def deprecation_headers(state: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a response, empty if its request uses nothing that will be removed.

    Args:
        state: of the request.
    """
    names: Mapping[str, str] = state.get(_NAMES) or {}
    successor: str | None = state.get(_SUCCESSOR)
    found = {}
    if names:
        listed = ", ".join(f"{name}={replacement}" for name, replacement in names.items())
        found["Autoshard-Deprecated"] = listed
    if successor is not None:
        found["Link"] = f'<{successor}>; rel="successor-version"'
    return {"Deprecation": _SINCE, "Sunset": _REMOVED, **found} if found else {}
