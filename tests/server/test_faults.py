"""Services that are killed while jobs run: small versions of `make faults`."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.scenarios import Place, Scenario, server_killed, worker_killed


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", [server_killed, worker_killed])
def test_every_accepted_job_ends_once_and_right(
    scenario: Scenario, tmp_path: Path, postgres: Any
) -> None:
    outcome = scenario(Place(tmp_path, postgres, 4))
    assert outcome.holds, outcome
    assert outcome.settled.right == len(outcome.submitted.jobs) == 4
    assert outcome.settled.restarts >= 1
