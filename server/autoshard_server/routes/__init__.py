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

router = APIRouter()
for module in (plans, plan_tools, graphs, searches, jobs, topologies, health, metrics):
    router.include_router(module.router)

__all__ = ["router"]
