"""The examples, and the pages whose code is for ranks, run on 4 ranks in one launch."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.long_cases import with_long
from support.processes import launched_process
from support.services import free_port
from support.shared_folder import shared_folder

from docs.pages import num_ranks, pages, run_python

FOLDER = Path(__file__).parents[2] / "examples"
NUM_RANKS = 4
MAX_LINES = 60
SERVICE = "service_postgresql"


def run(name: str) -> str:
    """What an example prints; it finds the environment of torchrun, and its process group."""
    printed = io.StringIO()
    with launched_process(), warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # of PEFT
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def learns(name: str) -> None:
    losses = [float(loss) for loss in re.findall(r"\bloss'?:? '?([\d.]+)", run(name))]
    if dist.get_rank() == 0:
        assert len(losses) == 5
        assert losses[-1] < losses[0]


def generates() -> None:
    printed = run("generate_kv_cache")
    if dist.get_rank() == 0:
        assert re.fullmatch(r"\[\[(\d+, ){7}\d+\], \[(\d+, ){7}\d+\]\]\n", printed)


def discovers() -> None:
    printed = run("custom_operator")
    if dist.get_rank() == 0:
        assert "Shard" in printed


def shows(path: Path) -> None:
    with launched_process(), warnings.catch_warnings(), shared_folder() as folder:
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # of PEFT
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            run_python(path)


CASES: dict[str, Callable[[], None]] = {
    **{
        name: partial(learns, name)
        for name in ("train_gpt2", "trainer_llama", "lora_peft", "mixture_of_experts")
    },
    **{
        path.name: partial(shows, path)
        for path in pages()
        if num_ranks(path.read_text(encoding="utf-8")) == NUM_RANKS
    },
    "generate_kv_cache": generates,
    "custom_operator": discovers,
}
LONG = ("trainer_llama", "lora_peft")
"""The libraries' training loops and adapters are in the cases of integrations."""


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)


@pytest.mark.thorough
def test_the_service_runs_on_postgresql(postgres: Any) -> None:
    environment = {
        **os.environ,
        "AUTOSHARD_STORE_URL": postgres.create_database(),
        "PORT": str(free_port()),
    }
    done = subprocess.run(  # noqa: S603  our own example
        [sys.executable, str(FOLDER / f"{SERVICE}.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plans = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert plans[0][0] == plans[1][0]
    assert [source for _, source in plans] == ["solved", "cached"]


def test_each_example_is_short_tested_and_in_the_table() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert {file.stem for file in files} == {c for c in CASES if not c.endswith(".md")} | {SERVICE}
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) < MAX_LINES, file.name
        assert lines[0].startswith('"""'), file.name
        assert lines[2].startswith("Run it"), file.name
        assert file.name in lines[2]
        assert f"[{file.name}]({file.name})" in table
