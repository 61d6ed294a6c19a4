"""docs/performance.md: text by hand, with tables between markers that are written here."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("autoshard", "highspy", "numpy", "torch", "transformers")


class MarkerMissingError(Exception):
    """The document has no place for a table."""


def replace_table(document: str, name: str, table: str) -> str:
    """The document with a table in its place, between `<!-- NAME -->` and `<!-- /NAME -->`.

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


def caption(how: str) -> str:
    """When, on what and how a table was measured; call it when the measuring begins."""
    busy, cores = os.getloadavg()[0], os.cpu_count()
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        f"*{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {_processor()}, {cores} cores, "
        f"{_memory() / 1e9:.0f} GB, load {busy:.1f} when it began; {platform.system()}, "
        f"Python {platform.python_version()}, {packages}{_commit()}; {how}.*"
    )


def _commit() -> str:
    """The commit that is measured, after a comma; empty outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(  # noqa: S603  nothing but our own words
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", commit {done.stdout.strip()}"


def _processor() -> str:
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
