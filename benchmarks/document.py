"""Writes tables between markers into Markdown documents whose other text is written by hand."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = Path(__file__).parent / "results"
"""Folder of results that are too long for a page."""


class MarkerMissingError(Exception):
    """The document lacks the markers of a table."""


def replace_table(document: str, name: str, table: str) -> str:
    """Replace the text between `<!-- NAME -->` and `<!-- /NAME -->` by a table.

    Raises:
        MarkerMissingError: the document lacks the two markers.
    """
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    changed, count = place.subn(lambda _: f"\n{table}\n\n", document)
    if count != 1:
        raise MarkerMissingError(
            f"the document has {count} places for the table {name!r}; it needs the lines "
            f"'<!-- {name} -->' and '<!-- /{name} -->' once"
        )
    return changed


def write_table(document: Path, name: str, *parts: str) -> None:
    """Replace a table of a page, such as by a caption and rows with an empty line between."""
    text = replace_table(document.read_text(encoding="utf-8"), name, "\n\n".join(parts))
    document.write_text(text, encoding="utf-8")


def caption(conditions: str) -> str:
    """Day, machine, commit and conditions of a measurement; call it at its start.

    The commit says the versions of all packages: they are in constraints.txt.
    """
    made = f"; commit {found}" if (found := commit()) else ""
    return (
        f"*{datetime.now(UTC):%Y-%m-%d}; {processor()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}{made}; {conditions}.*"
    )


def commit() -> str:
    """The commit that is measured; empty outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(  # noqa: S603  a constant command
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def processor() -> str:
    """Name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(
            r"^model name\s*: (.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE
        )
        if named:
            return named.group(1)
    return platform.processor() or platform.machine()
