"""Runs cases of test files on ranks, as `tests/support/ranks.py` does, and yields their errors."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

_ROOT = Path(__file__).parents[1]
_TICK = 0.5
"""Seconds between looks at the results."""


@dataclass(frozen=True, slots=True)
class RankCases:
    """A program that launches ranks; starting it takes longer than a launch.

    Attributes:
        requests: takes requests, each a line of JSON.
        answers: has a line for each request.
    """

    requests: IO[str]
    answers: IO[str]

    @classmethod
    @contextmanager
    def started(cls, device: str = "cpu") -> Iterator["RankCases"]:
        """A context with the program, whose ranks are on CPUs, or on GPUs ("cuda")."""
        paths = os.pathsep.join([str(_ROOT / "tests"), str(_ROOT), *sys.path])
        with subprocess.Popen(
            [sys.executable, "-m", "support.ranks"],
            env={**os.environ, "PYTHONPATH": paths, "AUTOSHARD_TEST_DEVICE": device},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            yield cls(process.stdin, process.stdout)
            process.stdin.close()

    def names(self, file: Path) -> tuple[int, list[str]]:
        """The number of ranks and the cases of a file but the long ones."""
        print(json.dumps({"file": str(file)}), file=self.requests, flush=True)
        num_ranks, names = json.loads(self.answers.readline())
        return num_ranks, names

    def run(
        self, file: Path, num_ranks: int, names: Sequence[str], seconds: float
    ) -> Iterator[tuple[str, str]]:
        """Run cases of a file in one launch; yields each with its error, empty if it passed.

        Cases that have not ended in time are left out.

        Raises:
            RuntimeError: the launch failed.
        """
        with TemporaryDirectory(prefix="ranks-") as folder:
            launch = {"file": str(file), "folder": folder, "num_ranks": num_ranks}
            given = {**launch, "names": list(names), "timeout": seconds}
            print(json.dumps(given), file=self.requests, flush=True)
            known: dict[str, str] = {}
            while not select.select([self.answers], [], [], _TICK)[0]:
                yield from _new_errors(Path(folder), num_ranks, known)
            status = self.answers.readline().strip()
            yield from _new_errors(Path(folder), num_ranks, known)
            if status not in {"0", "timeout"}:
                log = Path(folder, "log").read_text(encoding="utf-8")
                raise RuntimeError(f"the launch ended with status {status}:\n{log}")


def _new_errors(folder: Path, num_ranks: int, known: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Cases that have ended on all ranks, with the error of the first that failed."""
    launches = sorted(folder.glob("launch*"), key=lambda path: int(path.name[len("launch") :]))
    attempts = [[path / f"{rank}.json" for rank in range(num_ranks)] for path in launches]
    outcomes = [list(map(_read, attempt)) for attempt in attempts]
    with suppress(OSError):
        outcomes.append(json.loads((folder / "outcomes.json").read_bytes()))
    for ranks in outcomes:
        for name in ranks[0]:
            if name not in known and all(name in rank for rank in ranks):
                known[name] = next(filter(None, (rank[name] for rank in ranks)), "")
                yield name, known[name]


def _read(path: Path) -> dict[str, str]:
    """The outcomes in a file; none while it is written."""
    try:
        outcomes: dict[str, str] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return outcomes
