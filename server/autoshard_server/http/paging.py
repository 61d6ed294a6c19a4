"""Pages of lists (AIP-158): their parameters, their tokens, and their `Link` headers."""

import json
import math
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response

from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.store.tables import Cursor

_MAX_PAGE = 250
"""Entries of a page: writing more of them as JSON would delay other responses."""

_DEFAULT_PAGE = 50

_ID = re.compile(r"[0-9a-f]{1,64}")
"""Ids of jobs, plans and events."""


class Paging:
    """The page of a list that a request asks for.

    Args:
        request: for the page.
        response: that will have the page.
        page_size: largest number of entries; one that is too large is reduced.
        page_token: of the page; empty for the first one.

    Attributes:
        after: cursor of the previous page; None for the first page.
        limit: largest number of entries.

    Raises:
        ServerError: REQUEST, if the token is invalid.
    """

    def __init__(
        self,
        request: Request,
        response: Response,
        page_size: Annotated[
            int,
            Query(
                ge=0,
                le=2**31 - 1,
                description=f"largest number of entries; 0 means {_DEFAULT_PAGE}, at most "
                f"{_MAX_PAGE}",
            ),
        ] = 0,
        page_token: Annotated[
            str,
            Query(
                max_length=512,
                description="next_page_token of the previous page; empty at first",
            ),
        ] = "",
    ) -> None:
        self._request = request
        self._response = response
        self.after = _cursor_of(page_token)
        self.limit = min(page_size or _DEFAULT_PAGE, _MAX_PAGE)

    def next_token(self, cursor: Cursor | None) -> str:
        """The token of the next page; adds the header `Link` (RFC 8288) to the response.

        It has the addresses of the first page and of the next, relative to the request's, so that
        they also hold behind a reverse proxy.

        Args:
            cursor: of the next page; None at the end of the list.
        """
        token = token_of(cursor)
        parameters = self._request.query_params.multi_items()
        query = [item for item in parameters if item[0] != "page_token"]
        links = {"first": query}
        if token:
            links["next"] = [*query, ("page_token", token)]
        self._response.headers["Link"] = ", ".join(
            f'<?{urlencode(items)}>; rel="{relation}"' for relation, items in links.items()
        )
        return token


PagingParameter = Annotated[Paging, Depends()]


def token_of(cursor: Cursor | None) -> str:
    """The opaque token of a cursor; empty at the end of the list."""
    return "" if cursor is None else urlsafe_b64encode(json.dumps(cursor).encode()).decode()


def _cursor_of(token: str) -> Cursor | None:
    """The cursor of a token; None for the first page.

    Raises:
        ServerError: REQUEST, if the token is invalid.
    """
    if not token:
        return None
    try:
        created_at, key = json.loads(urlsafe_b64decode(token.encode()))
        is_time = isinstance(created_at, float) and math.isfinite(created_at)
        if is_time and isinstance(key, str) and _ID.fullmatch(key):
            return Cursor(created_at, key)
    except (ValueError, TypeError):
        pass
    found = [{"pointer": "/query/page_token", "detail": "not a page token"}]
    raise ServerError(
        ProblemType.REQUEST,
        "page_token is invalid; send next_page_token of the previous page unchanged",
        extensions={"errors": found},
    )
