"""The plan page as the text of one HTML file."""

import gzip
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any

from autoshard.graph import graph_from_json
from autoshard.mesh import mesh_text
from autoshard.plan.document import Plan
from autoshard.report.answer import WITHIN
from autoshard.report.page.content import ExportedText, page_report
from autoshard.report.page.scripts import bundled_script, page_files

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript><p>{words}</p></noscript>
<div id="page"></div>
<script type="application/gzip" id="plan">{plan}</script>
<script type="application/gzip" id="report">{report}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def plan_page(
    plan: Plan,
    *,
    other: Plan | None = None,
    exports: Sequence[ExportedText] = (),
    explanations: Sequence[Mapping[str, Any]] = (),
    source: str = "plan.json",
    within: float = WITHIN,
) -> str:
    """The plan page: one HTML file that needs neither a server nor the internet.

    It has the plan document and the page's report, both as JSON, compressed with gzip and in
    base64. Its policy lets it run its own script only, and load nothing.

    Args:
        plan: the plan, or a document without one.
        other: a plan of the same program, from which the page shows the difference.
        exports: the plan as code and settings, to copy from the page.
        explanations: of choices of the plan, each `autoshard.planner.Explanation` as JSON.
        source: file, id or address of the plan, for the commands that the page names.
        within: share by which the simplest layout may be slower than the fastest.

    Raises:
        PlanError: the other plan is of another program.

    Example:
        >>> from pathlib import Path
        >>> Path("plan.html").write_text(plan_page(Plan.load("plan.json")), encoding="utf-8")
    """
    content = page_report(
        plan, other=other, exports=exports, explanations=explanations, source=source, within=within
    )
    script, style = bundled_script(), _style()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return _PAGE.format(
        policy=escape(policy),
        title=escape(_title(plan)),
        style=style,
        words=escape(f"{plan}. {plan.certificate_statement}"),
        plan=_compressed(plan.to_json()),
        report=_compressed(content.to_json()),
        script=script,
    )


def _title(plan: Plan) -> str:
    model = graph_from_json(plan.stages[0].program).model if plan.found else None
    return f"{model.name if model and model.name else 'Plan'} on {mesh_text(plan.mesh)}"


@cache
def _style() -> str:
    return (page_files() / "page.css").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _compressed(text: str) -> str:
    # Without the time, so that the same plan is the same file.
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()
