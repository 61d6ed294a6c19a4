"""The routes of the API, one module per resource."""

from fastapi import APIRouter

from autoshard_server.routes import (
    graphs,
    health,
    jobs,
    metrics,
    plan_tools,
    plans,
    searches,
    topologies,
)

routers = tuple(
    module.router
    for module in (plans, plan_tools, graphs, searches, jobs, topologies, health, metrics)
)

router = APIRouter()
for resource in routers:
    router.include_router(resource)

__all__ = ["router", "routers"]
