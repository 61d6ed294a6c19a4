"""The program that runs test cases on ranks: failures are named, and other cases still run."""

import json
from pathlib import Path

from support.on_ranks import RunLaunch

CASES = """
import os
import torch
import torch.distributed as dist


def dies():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def fails():
    assert dist.get_rank() == 1


def sums():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == 2


CASES = {"first": sums, "dies": dies, "second": sums, "fails": fails, "third": sums}
"""


def test_a_rank_that_dies_or_fails_is_named_and_the_other_cases_run(
    tmp_path: Path, run_launch: RunLaunch
) -> None:
    file = tmp_path / "a" / "b" / "cases.py"
    file.parent.mkdir(parents=True)
    file.write_text(CASES)
    names = ["first", "dies", "second", "fails", "third"]
    run_launch(file, tmp_path, 2, names)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert [list(found) for found in outcomes] == [names, names]
    assert {n for n in names if any(found[n] for found in outcomes)} == {"dies", "fails"}
    assert "rank 1 with status 3" in outcomes[1]["dies"]
    assert "AssertionError" in outcomes[0]["fails"]
    assert not outcomes[1]["fails"]
