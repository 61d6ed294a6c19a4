"""Writes tables between markers into Markdown documents whose other text is written by hand."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

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


def caption(conditions: str) -> str:
    """Day, machine, commit and conditions of a measurement; call it at its start.

    The commit says the versions of all packages but torch: they are in constraints.txt.
    """
    busy, cores = os.getloadavg()[0], os.cpu_count()
    made = f", commit {found}" if (found := commit()) else ""
    return (
        f"*{datetime.now(UTC):%Y-%m-%d}; {processor()}, {cores} cores, "
        f"{_memory() / 1e9:.0f} GB, load {busy:.1f} when it began; "
        f"torch {version('torch')}{made}; {conditions}.*"
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


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
