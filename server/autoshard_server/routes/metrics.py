"""Figures for Prometheus."""

from functools import partial

import anyio.to_thread
from fastapi import APIRouter, Response

from autoshard_server.http.auth import Scraper
from autoshard_server.http.exposition import CONTENT_TYPE, exposition
from autoshard_server.http.specification import guarded_answers
from autoshard_server.routes.parameters import ServiceHere

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    operation_id="getMetrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={
        200: {"description": "Figures.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **guarded_answers(),
    },
)
async def get_metrics(service: ServiceHere, _caller: Scraper) -> Response:
    """Requests, durations, jobs by state, what the cache holds."""
    text = await anyio.to_thread.run_sync(partial(exposition, service))
    return Response(text, media_type=CONTENT_TYPE)
