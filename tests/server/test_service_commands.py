"""The commands of docs/service.md, run against a service."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "service.md"


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_page_runs(start_service: Any, graph: bytes, tmp_path: Path) -> None:
    service = start_service(store_url=f"sqlite:///{tmp_path / 'store.sqlite3'}")
    (tmp_path / "model.pt2").write_bytes(graph)
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    script = f"set -eux\nURL={service.url}\n" + "".join(blocks)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(  # noqa: S603  our own page
        ["bash", "-c", script],  # noqa: S607  whichever there is
        cwd=tmp_path,
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "event: state" in done.stdout
