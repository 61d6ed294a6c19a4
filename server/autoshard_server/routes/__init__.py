"""The routes of the API, one module per resource."""

from autoshard_server.routes import audit, graphs, health, jobs, pages, plans, searches, topologies

__all__ = ["routers"]

_MODULES = plans, graphs, searches, jobs, topologies, audit, health, pages

routers = tuple(module.router for module in _MODULES)
