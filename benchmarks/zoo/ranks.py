"""Running the small sizes on ranks, which the tests of `tests/zoo` do; and what came out."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

_ROOT = Path(__file__).parents[2]


def run_on_ranks(folder: Path) -> Mapping[str, str]:
    """Every case of the zoo on ranks: what went wrong by the case's name, empty where nothing did.

    Args:
        folder: where pytest's report is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = (folder / "ranks.xml").resolve()
    command = [sys.executable, "-m", "pytest", "tests/zoo", "-m", "zoo or ranks", "-q"]
    subprocess.run([*command, f"--junitxml={report}"], cwd=_ROOT, check=False)  # noqa: S603  our own tests
    return outcomes_in(report)


def outcomes_in(report: Path) -> Mapping[str, str]:
    """What a report of pytest says of each case of a test, by the case's name."""
    cases = ET.parse(report).iter("testcase")  # noqa: S314  pytest wrote it
    return dict(_outcome(case) for case in cases if "[" in case.attrib["name"])


def _outcome(case: ET.Element) -> tuple[str, str]:
    name = case.attrib["name"].partition("[")[2].removesuffix("]")
    failure = case.find("failure")
    text = "" if failure is None else (failure.text or failure.attrib["message"])
    return name, text.strip().rpartition("\n")[2]
