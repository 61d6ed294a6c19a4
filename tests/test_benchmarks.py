"""The command that writes docs/performance.md, on one tiny case; and the page's places."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"


def benchmarks(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(  # noqa: S603  our own module
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


def python(code: str) -> str:
    done = subprocess.run(  # noqa: S603  our own module
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported models and results, shared by the tests."""
    return tmp_path_factory.mktemp("benchmarks")


def table_of(page: Path, name: str) -> str:
    return page.read_text(encoding="utf-8").split(f"<!-- {name} -->")[1].split("<!-- /")[0]


@pytest.mark.thorough
def test_a_tiny_model_gets_its_lines_and_the_rest_of_the_page_stays(
    folder: Path, tmp_path: Path
) -> None:
    page = Path(shutil.copy(PAGE, tmp_path))
    asked = ("--tables", "shares", "--models", "gpt2-tiny", "--meshes", "2x4", "--repetitions", "2")
    places = ("--folder", folder, "--document", page, "--details", tmp_path)
    done = benchmarks(*asked, *places)
    assert done.returncode == 0, done.stderr
    table = table_of(page, "shares")
    rows = (tmp_path / "planning_shares.md").read_text(encoding="utf-8")
    assert "| gpt2-tiny on 2x4, training | optimal | 0.0" in rows
    assert "| gpt2-tiny on 2x4, training, memory lifted | optimal | 0.0" in rows
    assert "| 2x4, training | 4 |" in table
    assert "4 cases: " in table
    assert "medians of 2 runs, a part of the models and meshes" in table
    assert table_of(page, "depth") == table_of(PAGE, "depth")
    assert len(list((folder / "results").glob("gpt2-tiny-*.json"))) == 4


@pytest.mark.thorough
def test_a_case_that_is_stopped_stays_with_its_reason(folder: Path, tmp_path: Path) -> None:
    page = Path(shutil.copy(PAGE, tmp_path))
    asked = ("--tables", "shares", "--models", "gpt2-tiny", "--meshes", "8", "--timeout", "0.01")
    places = ("--folder", folder, "--document", page, "--details", tmp_path)
    done = benchmarks(*asked, *places)
    assert done.returncode == 0, done.stderr
    assert "| 8, training | 1 | 0 | - | - | - |" in table_of(page, "shares")
    rows = (tmp_path / "planning_shares.md").read_text(encoding="utf-8")
    assert "| gpt2-tiny on 8, training, memory lifted | **failed** | - |" in rows
    assert (
        "- gpt2-tiny on 8, training, memory lifted: stopped after 0.01 s in phase 'start'" in rows
    )


def test_the_page_has_one_place_for_every_table() -> None:
    names = python("from benchmarks.tables import TABLES; print(*TABLES)").split()
    text = PAGE.read_text(encoding="utf-8")
    assert names
    for name in names:
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1, name


@pytest.mark.thorough
def test_every_model_of_a_table_is_one_that_can_be_exported() -> None:
    code = (
        "from benchmarks.models import MODELS; from benchmarks import tables; "
        "print(*{*tables.MODELS, *tables._DEPTHS} - set(MODELS))"
    )
    assert not python(code)
