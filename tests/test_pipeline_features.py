"""The page about pipelines: tests that its table of features names exist, and its examples run."""

import csv
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "pipelines.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows() -> Iterator[tuple[str, list[str]]]:
    """The features of the table, each with the tests that it names."""
    with (TESTS.parent / "docs" / "pipeline_features.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield row["feature"], row["tests"].split(" | ")


def test_each_row_names_tests_that_exist() -> None:
    found = list(rows())
    assert len(found) > 10
    for feature, names in found:
        assert names, feature
        for name in names:
            assert is_test(name), name


def is_test(name: str) -> bool:
    """Whether there is a test of this name, or a case on ranks whose name begins with it."""
    module, _, test = name.partition(": ")
    if module.startswith("runtime/cases/"):
        cases = import_module(module.replace("/", ".")).CASES
        return any(case.startswith(test) for case in cases)
    code = (TESTS / f"{module}.py").read_text(encoding="utf-8")
    return re.search(rf"^def {re.escape(test)}\(", code, re.MULTILINE) is not None


def test_the_example_of_where_to_cut_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", section("Where to cut"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  our own page
    layers = [len(stage.parameters) // 2 for stage in names["plan"].stages]
    assert f"# layers: {layers}" in code


def test_the_example_of_planning_runs() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", section("Planning a pipeline"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  our own page
    pipeline = names["plan"].pipeline
    assert len(names["plan"].stages) == 4
    assert f"# {pipeline.ranks}" in code
