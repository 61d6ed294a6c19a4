"""The command that writes docs/zoo.md, on one family; and the page's places."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "zoo.md"


def zoo(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "benchmarks.zoo", *map(str, arguments)]
    done = subprocess.run(  # noqa: S603  our own module
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def table_of(page: Path, name: str) -> str:
    return page.read_text(encoding="utf-8").split(f"<!-- {name} -->")[1].split("<!-- /")[0]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return Path(shutil.copy(PAGE, tmp_path))


@pytest.mark.thorough
def test_a_case_that_failed_is_named_and_one_that_is_done_is_not_repeated(
    page: Path, tmp_path: Path
) -> None:
    places = ("--folder", tmp_path, "--document", page, "--details", tmp_path)
    zoo("--families", "two-tower", "--timeout", "0.01", *places)
    rows = (tmp_path / "zoo_planned.md").read_text(encoding="utf-8")
    assert rows.count("**failed**") == 4
    assert "- two-tower on 2x4, inference: stopped after 0.01 s" in rows
    assert "- two-tower, 4 of 4 cases: stopped after 0.01 s" in table_of(page, "planned")
    said = zoo("--families", "two-tower", *places)
    assert "two-tower on 8, training: optimal" in said
    results = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert zoo("--families", "two-tower", *places) == said
    assert results == {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    rows = (tmp_path / "zoo_planned.md").read_text(encoding="utf-8")
    assert "**failed**" not in rows
    assert "| two-tower | ten million users and items | 5.12 B | 25 | 0.0" in rows
    table = table_of(page, "planned")
    assert "| 8, training | 1 | 1 | 1 | 1 | 1 |" in table
    assert "1 of 93 families measured. In 1 families all" in table
