"""The page as a file: its script, its policy, its libraries, and the command that writes it."""

import hashlib
import json
import os
import re
import stat
from base64 import b64decode, b64encode
from gzip import decompress
from pathlib import Path

import pytest
from support.command_line import autoshard
from support.models import Planner, llama, small_graph

from autoshard.plan import Plan
from autoshard.report.page import plan_page
from autoshard.report.page.scripts import bundled_script, page_files

FILES = Path(str(page_files()))
MAX_LINES = 400


@pytest.fixture(scope="module")
def plan(planned: Planner) -> Plan:
    return planned(small_graph(llama), (2, 2))


def embedded(page: str, name: str) -> str:
    found = re.search(rf'<script type="application/gzip" id="{name}">([^<]*)</script>', page)
    assert found is not None
    return decompress(b64decode(found[1])).decode()


def test_the_page_has_the_plan_document_itself(plan: Plan) -> None:
    page = plan_page(plan)
    assert embedded(page, "plan") == plan.to_json()
    assert page == plan_page(plan)


def test_the_policy_allows_the_script_and_the_style_of_the_page_only(plan: Plan) -> None:
    page = plan_page(plan)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    allowed = policy[1].replace("&#x27;", "'")
    for tag, directive in ((r'script type="module"', "script-src"), ("style", "style-src")):
        text = re.search(rf"<{tag}>(.*?)</(?:script|style)>", page, re.DOTALL)
        assert text is not None
        digest = b64encode(hashlib.sha256(text[1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in allowed
    assert allowed.startswith("default-src 'none';")
    assert "unsafe" not in allowed


def test_the_script_closes_no_tag_and_imports_nothing() -> None:
    script = bundled_script()
    assert "</script" not in script
    assert re.search(r"^\s*(import|export)\b", script, re.MULTILINE) is None


def test_the_libraries_are_those_of_their_packages() -> None:
    vendored = FILES / "vendored"
    lines = (vendored / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = dict(line.split()[::-1] for line in lines)
    files = {p.name for p in vendored.iterdir() if p.suffix == ".mjs" or "LICENSE" in p.name}
    assert set(sums) == files
    for name, digest in sums.items():
        assert hashlib.sha256((vendored / name).read_bytes()).hexdigest() == digest


def test_modules_are_small() -> None:
    for path in FILES.glob("*.[jcd]*"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, path.name


def test_the_command_writes_the_page_and_opens_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, opened, browser = tmp_path / "plan.json", tmp_path / "opened", tmp_path / "browser"
    plan.save(file)
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("BROWSER", os.fspath(browser))
    page = tmp_path / "plan.html"
    name = "model.norm.weight"
    done = autoshard("show", file, "--html", page, "--open", "--why", name)
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    text = page.read_text(encoding="utf-8")
    assert embedded(text, "plan") == plan.to_json()
    assert len(json.loads(embedded(text, "report"))["explanations"]) == 1
    refused = autoshard("show", file, "--why", name)
    assert refused.exit_code == 1
    assert opened.read_text().strip() == page.as_uri()
