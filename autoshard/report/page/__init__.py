"""The plan page: a plan to look into in a browser, as one HTML file that needs nothing else."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.report.page.content import ExportedText
    from autoshard.report.page.writer import plan_page
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = ["ExportedText", "plan_page"]
