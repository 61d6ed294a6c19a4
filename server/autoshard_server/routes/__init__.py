"""The routes of the API, one module per resource."""

from autoshard_server.routes import graphs, health, jobs, pages, plans, topologies

__all__ = ["routers"]

routers = tuple(module.router for module in (plans, graphs, jobs, topologies, health, pages))
