"""The pages: their code runs, outputs in them are current, their links lead somewhere."""

import re
from pathlib import Path

import pytest

from docs.pages import ROOT, PageError, blocks, pages, run_page

PAGES = {str(path.relative_to(ROOT)): path for path in pages()}
WITH_CODE = [
    name
    for name, path in PAGES.items()
    if any(
        block.runs and block.language in {"python", "console"}
        for block in blocks(path.read_text(encoding="utf-8"))
    )
]

SLOW = {
    "README.md",
    *(f"docs/{name}.md" for name in ("baselines", "client", "exports", "launch", "service")),
}
"""Pages whose code exports models of real sizes, or starts services and ranks."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] if n in SLOW else []) for n in WITH_CODE],
)
def test_the_code_runs_and_outputs_are_current(name: str, tmp_path: Path) -> None:
    shown = PAGES[name].read_text(encoding="utf-8")
    assert run_page(PAGES[name], tmp_path) == shown, "run `python -m docs.pages`"


MADE = """# A page
<!-- python
number = 6
-->
```python
print(number * 7)
```
<!-- output: python -->
```text
41
```
<!-- file: words.txt -->
```text
one
two
```
```console
grep -n two words.txt
```
It prints
<!-- output: grep -n two words.txt -->
```text
```
<!-- output: wc -l < words.txt -->
```text
```
<!-- output: echo solved in 1.25 s, 7 ms a step -->
```text
```
"""


def test_outputs_are_written_into_a_page(tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text(MADE)
    current = run_page(written, tmp_path)
    shown = [block.code for block in blocks(current) if block.mark == "output"]
    assert shown == ["42\n", "2:two\n", "2\n", "solved in ..., 7 ms a step\n"]
    written.write_text(current)
    assert run_page(written, tmp_path) == current


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```python\n1 / 0\n```\n", "page.md:2: ZeroDivisionError: division by zero"),
        ("```console\ntrue\nfalse\n```\n", "page.md:2: false\nstatus 1"),
    ],
)
def test_a_block_that_fails_is_named(block: str, message: str, tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text(block)
    with pytest.raises(PageError, match=re.escape(message)):
        run_page(written, tmp_path)


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = (PAGES[name].parent / file).resolve() if file else PAGES[name]
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in headings(target.read_text(encoding="utf-8")), link


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#]+)", index)}
    in_docs = {path for path in PAGES.values() if (ROOT / "docs") in path.parents}
    assert in_docs - listed == {ROOT / "docs" / "README.md"}
