"""A part of the interrupted saves of `benchmarks/interrupted_saves`: real ranks, real faults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.interrupted_saves.trials import FAULTS, is_possible

ROOT = Path(__file__).parents[2]
SUBJECTS = ("save_state", "replace_weights, one file by several")
COUNT = 2 * len(SUBJECTS) * len(FAULTS)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.skipif(not is_possible(), reason="strace is not installed, or may not trace")
def test_the_former_checkpoint_or_the_new_one_is_left(tmp_path: Path) -> None:
    options = ["--count", str(COUNT), "--seed", "1", "--no-write", "--folder", str(tmp_path)]
    options += ["--only", *SUBJECTS]
    # A process of its own, whose forks the ranks are, has no threads.
    done = subprocess.run(  # noqa: S603  constant
        [sys.executable, "-m", "benchmarks.interrupted_saves", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    rows = re.findall(r"^\| `.*\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", done.stdout, re.MULTILINE)
    numbers = [tuple(map(int, row)) for row in rows]
    assert [number for number, *_ in numbers] == [2] * len(numbers)
    assert all(former + new == 2 and not wrong for _, former, new, wrong in numbers)
    assert len(numbers) == COUNT // 2
