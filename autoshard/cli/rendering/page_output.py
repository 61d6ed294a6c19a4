"""The plan page as a file, and in the browser."""

import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from pydantic_core import to_jsonable_python

from autoshard.base.files import write_file
from autoshard.cli.rendering.output import check_output
from autoshard.plan import Plan
from autoshard.report.answer import WITHIN

if TYPE_CHECKING:  # it needs the solver
    from autoshard.planner import Explanation


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOptions:
    """Options that write a plan as a page to look into."""

    panel: ClassVar[str] = "A page to look into, instead of text"
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            callback=check_output,
            help="File for the page: verdict, memory, modules, mesh and step as pictures, in one "
            "HTML file that needs no server and no internet.",
        ),
    ] = None
    open: Annotated[
        bool,
        typer.Option(
            "--open", help="Open the page in the browser; in a temporary file without --html."
        ),
    ] = False

    @property
    def wanted(self) -> bool:
        """True if a page is to be written."""
        return self.html is not None or self.open

    def write(
        self,
        plan: Plan,
        source: str,
        *,
        other: Plan | None = None,
        explanations: "Sequence[Explanation]" = (),
        within: float = WITHIN,
    ) -> None:
        """Write the page, and open it.

        Args:
            plan: the plan, or a document without one.
            source: file, id or address of the plan, for the commands that the page names.
            other: a plan of the same program, from which the page shows the difference.
            explanations: of choices of the plan.
            within: share by which the simplest layout may be slower than the fastest.

        Raises:
            OptionError: the file cannot be written.
            PlanError: the other plan is of another program.
        """
        # Text needs neither the page nor the exports.
        from autoshard.exports import code_exports  # noqa: PLC0415
        from autoshard.report.page import plan_page  # noqa: PLC0415

        exports = code_exports(plan) if plan.found else ()
        path = self.html or Path(mkdtemp(prefix="autoshard-")) / "plan.html"
        found = to_jsonable_python(list(explanations))
        text = plan_page(
            plan, other=other, exports=exports, explanations=found, source=source, within=within
        )
        write_file(path, text)
        if self.open:
            webbrowser.open(path.resolve().as_uri())
