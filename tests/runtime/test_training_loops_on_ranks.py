"""Training and decoding loops with a planned model on 4 ranks."""

import csv
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from runtime.cases import (
    arguments,
    checkpoint_habits,
    compiled_habits,
    criteria,
    gradient_habits,
    micro_batches,
    misuse,
    mixed_precision,
    model_habits,
    one_call,
    opaque_modules,
    optimizer_habits,
    other_shapes,
    pending_gradients,
    python_state,
    several_programs,
    state_dicts,
    torch_versions,
    updated_buffers,
)
from runtime.cases.updated_buffers import MESHES
from support.long_cases import all_but_one, long_of, with_long
from support.ranks import joined

NUM_RANKS = 4
MODULES = (
    updated_buffers,
    misuse,
    one_call,
    several_programs,
    criteria,
    micro_batches,
    mixed_precision,
    optimizer_habits,
    gradient_habits,
    pending_gradients,
    model_habits,
    checkpoint_habits,
    opaque_modules,
    state_dicts,
    other_shapes,
    arguments,
    python_state,
    compiled_habits,
    torch_versions,
)
CASES = joined(*MODULES)
LONG = {
    *all_but_one(CASES, [*MESHES]),
    *long_of(
        *(one_call, micro_batches, mixed_precision, several_programs, optimizer_habits),
        compiled_habits,
    ),
}
PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.matrix(10)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)


def rows() -> Iterator[tuple[str, list[str]]]:
    """The habits of the page's table, each with the names of what tests it."""
    with PAGE.with_name("training_habits.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield row["habit"], row["tests"].split(" | ")


def test_the_page_has_all_habits_that_are_not_simply_right() -> None:
    found = re.search(r"^\| habit \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    shown = [tuple(line.strip("| ").split(" | ")) for line in found[1].splitlines()]
    with PAGE.with_name("training_habits.csv").open(encoding="utf-8") as file:
        every = [(row["habit"], row["what happens"]) for row in csv.DictReader(file)]
    assert shown == [one for one in every if one[1] != "right"]


def test_each_row_of_the_table_has_cases() -> None:
    for habit, names in rows():
        assert names, habit
        for name in names:
            assert is_tested(name), name


def is_tested(name: str) -> bool:
    """Whether a case of this launch, on both meshes, another one or a test has the name."""
    module, _, case = name.partition(": ")
    if module.rpartition(".")[2].startswith("test_"):
        return hasattr(import_module(module), case)
    if module in {one.__name__.rpartition(".")[2] for one in MODULES}:
        return name in CASES or all(f"{name}, {mesh}" in CASES for mesh in MESHES)
    cases = Path(__file__).parents[1] / "integrations" / "cases"
    area = "integrations" if (cases / f"{module}.py").exists() else "runtime"
    known = import_module(f"{area}.cases.{module}").CASES
    return any(other.startswith(case) for other in known)


def test_each_habit_is_in_the_table() -> None:
    named = {name for _, names in rows() for name in names}
    habits = joined(
        *(optimizer_habits, gradient_habits, pending_gradients, model_habits),
        *(checkpoint_habits, other_shapes, misuse),
    )
    assert not {name for name in habits if not {name, name.rpartition(", ")[0]} & named}
