"""The checker: proves a plan again, without the planner and the solver."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.checker.check import check_plan
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "check_plan",
]
