"""Pricing: seconds and bytes of what a plan runs, alike for the planner, plans and the checker."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.pricing.axis_roles import AxisRole, AxisUse, find_roles
    from autoshard.pricing.simulation import Event, Simulation, chrome_trace, simulate
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "AxisRole",
    "AxisUse",
    "Event",
    "Simulation",
    "chrome_trace",
    "find_roles",
    "simulate",
]
