"""Workers on other hosts, of which one vanishes: a small version of `make hosts`."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import missing_requirement


@pytest.mark.thorough
def test_two_hosts_solve_and_one_may_vanish(tmp_path: Path) -> None:
    if reason := missing_requirement():
        pytest.skip(reason)
    page = tmp_path / "page.md"
    page.write_text("<!-- hosts -->\n<!-- /hosts -->\n", encoding="utf-8")
    asked = ["--engines", "worker", "--hosts", "2", "--jobs", "2", "--share", "0.5"]
    done = subprocess.run(  # noqa: S603  our own program
        [sys.executable, "-m", "benchmarks.hosts", *asked, "--document", str(page)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text(encoding="utf-8")
    assert "| `autoshard worker` | 2 | 6 | 6 | 0 | 0 | " in text
    assert "| `autoshard worker` | 2, one vanishes | 4 | 4 | 0 | 1 |" in text
