"""The route of the audit log."""

from functools import partial

import anyio.to_thread
from fastapi import APIRouter

from autoshard_server.http.auth import Admin
from autoshard_server.http.documents import AuditPage
from autoshard_server.http.paging import PagingParameter
from autoshard_server.http.parameters import ServiceParameter
from autoshard_server.http.specification import describe
from autoshard_server.problems import ProblemType

router = APIRouter(tags=["audit"])


@router.get(
    "/v1/audit", **describe(ProblemType.REQUEST, answers={200: ("A page of events.", "Link")})
)
async def list_audit_events(
    service: ServiceParameter, caller: Admin, paging: PagingParameter
) -> AuditPage:
    """List who created, replaced, cancelled and deleted what in the project, newest first."""
    read = partial(
        service.stores.audit.page, caller.project, after=paging.after, limit=paging.limit
    )
    found, cursor = await anyio.to_thread.run_sync(read)
    return AuditPage(events=found, next_page_token=paging.next_token(cursor))
