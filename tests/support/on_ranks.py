"""Fixtures that run the cases of test files on ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_TIMEOUT = 1800

RunLaunch = Callable[[Path, Path, int, list[str]], None]


@pytest.fixture(scope="session")
def run_launch() -> Iterator[RunLaunch]:
    """Runs launches in forks of one process, started when the first test of a session asks."""
    with subprocess.Popen(
        [sys.executable, "-m", "support.ranks"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(file: Path, folder: Path, num_ranks: int, names: list[str]) -> None:
            given = {"file": str(file), "folder": str(folder), "num_ranks": num_ranks}
            launch = json.dumps({**given, "names": names, "timeout": _TIMEOUT})
            print(launch, file=process.stdin, flush=True)
            status = process.stdout.readline().strip()
            if status != "0":
                log = (folder / "log").read_text()
                pytest.fail(f"the ranks ended with {status}:\n{log}", pytrace=False)

        yield run
        process.stdin.close()


@pytest.fixture(scope="module")
def on_ranks(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    run_launch: RunLaunch,
) -> Callable[[str], None]:
    """Checks one case of the file's `CASES`; the first use runs all that were selected.

    The file names the number of ranks in `NUM_RANKS`, and its tests take the case as `case`.
    """
    names = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and "on_ranks" in item.fixturenames
    ]
    folder = tmp_path_factory.mktemp("ranks")
    selected = list(dict.fromkeys(names))
    num_ranks = request.module.NUM_RANKS
    run_launch(request.path, folder, num_ranks, selected)
    outcomes: list[dict[str, str]] = json.loads((folder / "outcomes.json").read_text())

    def check(name: str) -> None:
        for rank, outcome in enumerate(outcomes):
            if error := outcome[name]:
                pytest.fail(f"on rank {rank}:\n{error}", pytrace=False)

    return check
