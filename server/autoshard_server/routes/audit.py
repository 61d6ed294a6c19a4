"""The route of the audit log."""

from functools import partial

import anyio.to_thread
from fastapi import APIRouter, Request, Response

from autoshard_server.http.auth import Admin
from autoshard_server.http.documents import AuditPage
from autoshard_server.http.parameters import (
    PageSize,
    PageToken,
    ServiceParameter,
    cursor_of,
    page_limit,
    token_of,
)
from autoshard_server.http.specification import describe
from autoshard_server.problems import ProblemType
from autoshard_server.routes.responses import link_pages

router = APIRouter(tags=["audit"])


@router.get(
    "/v1/audit", **describe(ProblemType.REQUEST, answers={200: ("A page of events.", "Link")})
)
async def list_audit_events(
    request: Request,
    response: Response,
    service: ServiceParameter,
    caller: Admin,
    *,
    page_size: PageSize = 0,
    page_token: PageToken = "",
) -> AuditPage:
    """List who created, replaced, cancelled and deleted what in the project, newest first."""
    read = partial(
        service.stores.audit.page,
        caller.project,
        after=cursor_of(page_token),
        limit=page_limit(page_size),
    )
    found, cursor = await anyio.to_thread.run_sync(read)
    page = AuditPage(events=found, next_page_token=token_of(cursor))
    link_pages(request, response, page.next_page_token)
    return page
