"""Pipeline schedules, the transfers between stages, and their simulation."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.schedules.schedule import Schedule, schedule_error
    from autoshard.schedules.simulation import (
        ScheduleSimulation,
        simulate_pipeline,
        simulate_schedule,
    )
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "Schedule",
    "ScheduleSimulation",
    "schedule_error",
    "simulate_pipeline",
    "simulate_schedule",
]
