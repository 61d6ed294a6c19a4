"""The page about pipelines: its tables name tests and functions that exist; its examples run."""

import csv
import re
from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, isfunction, signature
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import pipelining
from torch.distributed.pipelining import Pipe, PipelineStage, ScheduleGPipe

from autoshard.plan import PlanOptions

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "pipelines.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


TABLES = {"pipeline_features.csv": "feature", "seeds.csv": "function"}
"""The tables, with a column that says what a row is about."""


def rows(table: str) -> Iterator[dict[str, str]]:
    with (TESTS.parent / "docs" / table).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


@pytest.mark.parametrize("table", TABLES)
def test_each_row_names_tests_that_exist(table: str) -> None:
    found = list(rows(table))
    assert len(found) > 10
    for row in found:
        assert row["tests"], row[TABLES[table]]
        for name in row["tests"].split(" | "):
            assert is_test(name), name
    assert f"({table})" in PAGE


def is_test(name: str) -> bool:
    """Whether there is a test of this name, or a case on ranks whose name begins with it."""
    module, _, test = name.partition(": ")
    if module.startswith("runtime/cases/"):
        cases = import_module(module.replace("/", ".")).CASES
        return any(case.startswith(test) for case in cases)
    code = (TESTS / f"{module}.py").read_text(encoding="utf-8")
    return re.search(rf"^def {re.escape(test)}\(", code, re.MULTILINE) is not None


def test_functions_of_ours_in_the_table_of_the_seeds_exist() -> None:
    for row in rows("seeds.csv"):
        assert row["autoshard"]
        for name in row["ours"].split(" | "):
            assert is_ours(name), name


def is_ours(name: str) -> bool:
    """True if autoshard has a function, or one with an argument, as in `export_model(args)`."""
    path, _, argument = name.removesuffix(")").partition("(")
    found: Any = import_module("autoshard")
    for part in path.split("."):
        fields = getattr(found, "model_fields", {})
        if part in fields:
            return not argument
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(f"{found.__name__}.{part}")
    if found is PlanOptions:
        return argument in PlanOptions.keywords()
    return not argument or argument in signature(found).parameters


def arguments(*functions: str) -> set[str]:
    """Arguments of functions that have a row in the table."""
    found = (row for row in rows("seeds.csv") if row["system"] == "torch")
    listed = (row["argument"] for row in found if row["function"] in functions)
    return {name for text in listed for name in text.split(", ")}


def test_every_function_and_argument_of_torch_has_a_row() -> None:
    functions = {row["function"] for row in rows("seeds.csv") if row["system"] == "torch"}
    assert set(pipelining.__all__) <= functions
    methods = {f"Pipe.{n}" for n, f in vars(Pipe).items() if isfunction(f) and n[0] != "_"}
    assert methods | {"Pipe.from_tracing"} <= functions
    of_pipe = set(signature(Pipe.__init__).parameters) - {"self"}
    assert of_pipe <= arguments("Pipe")
    for name in ("pipeline", "build_stage", "pipe_split", *methods, "Pipe.from_tracing"):
        found: Any = pipelining
        for part in name.split("."):
            found = getattr(found, part)
        assert set(signature(found).parameters) - {"self"} <= arguments(name), name
    assert set(signature(PipelineStage.__init__).parameters) - {"self"} <= arguments(
        "PipelineStage"
    )
    for name in pipelining.__all__:
        if name.startswith("Schedule") and isclass(kind := getattr(pipelining, name)):
            own = set(signature(kind.__init__).parameters) - {"self"}
            assert own <= arguments("Schedule*"), name
    for step in (ScheduleGPipe.step, ScheduleGPipe.eval):
        own = set(signature(step).parameters) - {"self"}
        assert own <= arguments(f"Schedule*.{step.__name__}")


NOT_INSTALLED = {
    "shard_model": "model shard_count",
    "Pipe": "module balance devices chunks checkpoint deferred_batch_norm",
    "AsyncPipe": "module balance group worker_map input_device chunks checkpoint "
    "deferred_batch_norm",
    "balance_by_time": "partitions module sample timeout device",
    "balance_by_size": "partitions module input chunks param_scale device",
    "autosharding_analysis_pass": "mg mesh_shape inter_node_bandwidth intra_node_bandwidth algo "
    "communications_backend skip_fully_replicated time_limit mip_rel_gap run_checks "
    "preload_solution ilp_solution_file skip_forward",
}
"""Arguments of functions of fairscale and MASE, which are not installed here."""


def test_every_argument_of_fairscale_and_mase_has_a_row() -> None:
    for function, names in NOT_INSTALLED.items():
        found = (row for row in rows("seeds.csv") if row["function"] == function)
        listed = (row["argument"] for row in found if row["system"] != "torch")
        assert set(names.split()) <= {name for text in listed for name in text.split(", ")}


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
