"""A fixture that runs the cases of a test file on gloo ranks."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_RANKS = Path(__file__).with_name("ranks.py")
_TIMEOUT = 1800


@pytest.fixture(scope="module")
def on_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
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
    outcomes = _launch(
        request.path,
        list(dict.fromkeys(names)),
        num_ranks=request.module.NUM_RANKS,
        folder=tmp_path_factory.mktemp("ranks"),
    )

    def check(name: str) -> None:
        for rank, outcome in enumerate(outcomes):
            if error := outcome[name]:
                pytest.fail(f"on rank {rank}:\n{error}", pytrace=False)

    return check


def _launch(file: Path, names: list[str], *, num_ranks: int, folder: Path) -> list[dict[str, str]]:
    command = [sys.executable, str(_RANKS), str(file), str(folder), f"--ranks={num_ranks}"]
    command += [f"--case={name}" for name in names]
    done = subprocess.run(  # noqa: S603  our own program
        command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    if done.returncode:
        pytest.fail(f"the ranks ended with {done.returncode}:\n{done.stderr}", pytrace=False)
    outcomes: list[dict[str, str]] = json.loads((folder / "outcomes.json").read_text())
    return outcomes
