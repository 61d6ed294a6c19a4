"""What the README shows is run: its Python, and its `autoshard` commands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, document: str = "README.md") -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [m["code"] for m in BLOCK.finditer(text) if m["language"] == language]


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(  # noqa: S603  our own README
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_readme_runs(tmp_path: Path) -> None:
    export, *others = blocks("python")
    run([sys.executable, "-c", export], tmp_path)
    commands = [
        line
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("autoshard") and "serve" not in line
    ]
    assert len(commands) == 8
    for command in commands:
        run([sys.executable, "-m", "autoshard.cli", *shlex.split(command)[1:]], tmp_path)
    for code in (*others, *blocks("python", "docs/client.md")):
        run([sys.executable, "-c", code], tmp_path)


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_readme_names_targets_that_exist(target: str) -> None:
    assert f"make {target}" in "".join(blocks("console"))
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
