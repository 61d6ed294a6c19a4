"""Lists in pages (AIP-158): a size, an opaque token for the next page."""

import json
import math
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Annotated

from fastapi import Query

from autoshard_server.problems import REQUEST, ServerError
from autoshard_server.store import Cursor

MOST = 1000
"""Largest page; more is not refused, as there is a next page."""

PageSize = Annotated[
    int,
    Query(ge=0, le=2**31 - 1, description=f"most entries to return; 0 means 50, at most {MOST}"),
]
PageToken = Annotated[
    str,
    Query(max_length=512, description="next_page_token of the page before; empty for the first"),
]

_DEFAULT = 50

_KEY = re.compile(r"[0-9a-f]{1,64}")
"""Ids of what is listed: jobs and plans."""


def page_limit(page_size: int) -> int:
    """Entries of a page."""
    return min(page_size or _DEFAULT, MOST)


def token_of(cursor: Cursor) -> str:
    """The token of the page after an entry."""
    return urlsafe_b64encode(json.dumps([cursor.created_at, cursor.id]).encode()).decode()


def cursor_of(token: str) -> Cursor | None:
    """The entry that a page follows; None for the first page.

    Raises:
        ServerError: REQUEST, where the token is none of ours.
    """
    if not token:
        return None
    try:
        created_at, key = json.loads(urlsafe_b64decode(token.encode()))
        is_time = isinstance(created_at, float) and math.isfinite(created_at)
        if is_time and isinstance(key, str) and _KEY.fullmatch(key):
            return Cursor(created_at, key)
    except (ValueError, TypeError):
        pass
    found = [{"pointer": "/query/page_token", "detail": "no token of a page"}]
    raise ServerError(
        REQUEST,
        "page_token is no token of a page; take next_page_token as it is",
        extensions={"errors": found},
    )
