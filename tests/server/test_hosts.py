"""Workers on two other hosts, of which one vanishes: a small version of `make hosts`."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import missing_requirement


@pytest.mark.long
def test_no_job_is_lost_with_the_host_of_its_worker(tmp_path: Path) -> None:
    if reason := missing_requirement():
        pytest.skip(reason)
    page = tmp_path / "page.md"
    page.write_text("<!-- hosts -->\n<!-- /hosts -->\n", encoding="utf-8")
    asked = ["--engines", "worker", "--rows", "loss", "--hosts", "2", "--jobs", "2"]
    done = subprocess.run(  # noqa: S603  our own program
        [sys.executable, "-m", "benchmarks.hosts", *asked, "--document", str(page)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = "| `autoshard worker` | 2, one vanishes | 4 | 4 | 0 | 1 |"
    assert row in page.read_text(encoding="utf-8")
