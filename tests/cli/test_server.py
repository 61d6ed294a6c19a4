"""Commands that use a service, also when it is down."""

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from rich.console import Console
from support.proxy import Say, proxied
from support.services import Mlp, keeping, serving
from typer.testing import CliRunner, Result

from autoshard.cli import ExitCode, app, options, progress
from autoshard.cli.commands.runs import fetch_plan_file
from autoshard.client import Client, JobProgress, Retry
from autoshard.errors import OptionError, RequestRejectedError, ServiceUnavailableError
from autoshard.graph import export_model
from autoshard.plan import Plan
from autoshard_server import ThreadExecutor
from autoshard_server.solvers.solving import solve

NOBODY = "http://127.0.0.1:9"


def autoshard(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with keeping(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.pt2"
    path.write_bytes(export_model(Mlp(), (torch.zeros(8, 16),)))
    return path


class ImpatientClient(Client):
    """Does not sit out a minute of silence."""

    def __init__(self, url: str, **given: Any) -> None:
        super().__init__(url, retry=Retry(outage=1.0), **given)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "Client", ImpatientClient)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "kept"))


def test_a_service_plans_as_the_command_does(url: str, archive: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    options = ("--mesh", "2,2", "--optimizer", "sgd", "-o")
    assert autoshard("plan", archive, *options, here).exit_code == 0
    done = autoshard("plan", archive, *options, there, "--server", url)
    assert done.exit_code == 0, done.output
    assert "made by the service" in done.stderr
    one, two = (Plan.from_json(path.read_bytes()) for path in (here, there))
    assert one.id == two.id
    assert one.stages == two.stages
    again = autoshard("plan", archive, *options, there, "--server", url, "--json")
    assert Plan.from_json(again.stdout) == two
    assert "already known to the service" in again.stderr


@pytest.mark.thorough
def test_a_service_searches_as_the_command_does(url: str, archive: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    options = ("--devices", "4", "--mode", "inference", "-o")
    alone = autoshard("search", archive, *options, here)
    asked = autoshard("search", archive, *options, there, "--server", url)
    assert (alone.exit_code, asked.exit_code) == (0, 0), asked.output
    tables = [
        result.stdout.partition("Meshes, best first")[2].partition("Next:")[0]
        for result in (alone, asked)
    ]
    assert tables[0] == tables[1] != ""
    one, two = (Plan.from_json(path.read_bytes()) for path in (here, there))
    assert (one.id, one.stages) == (two.id, two.stages)
    none = autoshard("search", archive, "--devices", "2", "--memory", "10B", "--server", url)
    assert none.exit_code == ExitCode.NO_PLAN
    failed = autoshard("search", archive, "--devices", "2", "--server", NOBODY)
    assert (failed.exit_code, "does not answer" in failed.stderr) == (1, True)


def test_a_mesh_whose_plan_was_not_kept_says_so(archive: Path) -> None:
    # The service's memory is that of its process, which the search's is not.
    with serving(ThreadExecutor(solve)) as forgetful:
        asked = autoshard("search", archive, "--devices", "2", "--server", forgetful)
    assert asked.exit_code == ExitCode.NO_PLAN
    words = " ".join(asked.stdout.split())
    assert "no plan was" in words
    assert "--mesh 2" in words


def test_a_service_covers_as_the_command_does(
    url: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = autoshard("coverage", archive, "--json")
    there = autoshard("coverage", archive, "--json", "--server", url)
    assert (there.exit_code, there.stdout) == (0, here.stdout)
    # Where there is a plan, nobody is asked.
    plan = tmp_path / "plan.json"
    assert autoshard("plan", archive, "--mesh", "2", "-o", plan).exit_code == 0
    monkeypatch.setenv("AUTOSHARD_SERVER", NOBODY)
    assert autoshard("coverage", archive).exit_code == 1
    assert autoshard("coverage", archive, plan).exit_code == 0


@pytest.mark.thorough
def test_without_the_service_the_plan_that_was_kept_is_used(
    url: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--mesh", "2,2", "--json", "--server")
    plan = Plan.from_json(autoshard("plan", archive, *options, url).stdout)
    done = autoshard("plan", archive, *options, NOBODY)
    assert done.exit_code == 0
    assert Plan.from_json(done.stdout) == plan
    assert "this plan was kept on this machine" in done.stderr
    failed = autoshard("plan", archive, "--mesh", "4", "--server", NOBODY)
    assert failed.exit_code == 1
    assert "does not answer" in failed.stderr
    # At launch: by its address, and by its id at a server that the environment names.
    folder = tmp_path / "fetched"
    folder.mkdir()
    found = fetch_plan_file(f"{url}/v1/plans/{plan.id}", folder)
    assert Plan.from_json(found.read_bytes()) == plan
    monkeypatch.setenv("AUTOSHARD_SERVER", NOBODY)
    found = fetch_plan_file(plan.id, folder)
    assert Plan.from_json(found.read_bytes()) == plan
    with pytest.raises(ServiceUnavailableError):
        fetch_plan_file("0" * 64, folder)
    monkeypatch.delenv("AUTOSHARD_SERVER")
    assert Plan.from_json(fetch_plan_file(plan.id, folder).read_bytes()) == plan
    with pytest.raises(OptionError, match="AUTOSHARD_SERVER"):
        fetch_plan_file("0" * 64, folder)
    assert fetch_plan_file("plan.json", folder) == Path("plan.json")


def test_the_bar_shows_phase_best_bound_and_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "errors", console)
    with progress.followed(quiet=False) as run:
        run.report(JobProgress(phase="queued", elapsed=0.0))
        run.report(
            JobProgress(phase="branching", incumbent=0.02, bound=0.019, gap=0.05, elapsed=1.0)
        )
    shown: Any = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    for text in ("branching", "best 20.000 ms", "bound 19.000 ms", "gap 5.00%"):
        assert text in shown, shown


def test_a_key_goes_only_to_the_service_that_is_ours(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSHARD_API_KEY", "secret")
    address = "/v1/plans/" + "0" * 64
    unlocked = Say(401, {}, b'{"title": "An API key is needed", "status": 401}')
    with proxied(url) as ours, proxied(url) as theirs:
        monkeypatch.setenv("AUTOSHARD_SERVER", ours.url)
        with pytest.raises(RequestRejectedError, match="no plan"):
            fetch_plan_file(ours.url + address, tmp_path)
        assert ours.passed[0].headers["Authorization"] == "Bearer secret"
        theirs.faults.append(unlocked)
        with pytest.raises(OptionError, match=f"AUTOSHARD_SERVER={theirs.url}"):
            fetch_plan_file(theirs.url + address, tmp_path)
        monkeypatch.delenv("AUTOSHARD_SERVER")
        with pytest.raises(RequestRejectedError, match="no plan"):
            fetch_plan_file(theirs.url + address, tmp_path)
        assert len(theirs.passed) == 2
        assert all("authorization" not in {k.lower() for k in r.headers} for r in theirs.passed)
