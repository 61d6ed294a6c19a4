"""Services on real sockets, and small exported programs for requests."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog
import torch
from sqlalchemy import Engine
from support.services import ONE_WORKER, listening

from autoshard.graph import export_model
from autoshard_server import Executor, ProcessExecutor, Settings, ThreadExecutor, create_app
from autoshard_server.solvers.executor import Solver
from autoshard_server.solvers.solving import solve
from autoshard_server.store.database import migrate
from autoshard_solver_cache import open_engine

PROGRAMS = Path(__file__).parent / "programs"


@dataclass
class Running:
    """A service on an ephemeral port, and a client of it."""

    url: str
    http: httpx2.Client
    app: Any

    def post(
        self, graph: bytes, request: Any = None, *, wait: float | None = None, **options: Any
    ) -> httpx2.Response:
        asked = {"mesh": {"shape": [2, 2]}} if request is None else request
        text = asked if isinstance(asked, str) else json.dumps(asked)
        headers = options.pop("headers", {})
        if wait is not None:
            headers = {**headers, "Prefer": f"wait={wait:g}"}
        files = {
            "graph": ("graph.pt2", graph, "application/octet-stream"),
            "request": (None, text, "application/json"),
        }
        return self.http.post("/v1/plans", files=files, headers=headers, **options)

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/jobs/{job_id}").json()
        return found

    def await_job(
        self, job_id: str, until: Callable[[dict[str, Any]], bool] = lambda job: job["done"]
    ) -> dict[str, Any]:
        for _ in range(12_000):
            job = self.job(job_id)
            if until(job):
                return job
            time.sleep(0.05)
        raise AssertionError(f"the job did not get there: {job}")

    def is_up(self) -> bool:
        return self.http.get("/readyz").status_code == 200


@dataclass
class Recording:
    """An executor that remembers the solvers it made."""

    executor: Executor
    solvers: list[Solver] = field(default_factory=list)

    def prepare(self) -> Solver:
        self.solvers.append(self.executor.prepare())
        return self.solvers[-1]


@contextmanager
def running(settings: Settings, executor: Executor | None = None) -> Iterator[Running]:
    app = create_app(settings, executor=executor)
    with listening(app) as url, httpx2.Client(base_url=url, timeout=300) as http:
        yield Running(url, http, app)


@pytest.fixture(scope="package", autouse=True)
def _plain_log() -> Iterator[None]:
    """Structlog's default renders local variables into tracebacks, which takes seconds."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    )
    yield
    structlog.reset_defaults()


OpenEngine = Callable[[], Engine]


@pytest.fixture(params=["sqlite", "postgresql"])
def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenEngine]:
    """Opens one database, empty at first."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    else:
        url = request.getfixturevalue("postgres").create_database()
    opened: list[Engine] = []

    def open_it() -> Engine:
        opened.append(open_engine(url))
        return opened[-1]

    yield open_it
    for one in opened:
        one.dispose()


@pytest.fixture
def engine(open_one: OpenEngine) -> Engine:
    made = open_one()
    migrate(made)
    return made


StartService = Callable[..., Running]


@pytest.fixture
def start_service() -> Iterator[StartService]:
    with ExitStack() as stack:

        def start(*, executor: Executor | None = None, **settings: Any) -> Running:
            given = {**ONE_WORKER, "store_url": "sqlite://", "shutdown_grace": 0, **settings}
            return stack.enter_context(running(Settings(**given), executor))

        yield start


@pytest.fixture(scope="session")
def service() -> Iterator[Running]:
    """One service shared by the tests that only ask; it solves in a thread, which is quick."""
    settings = Settings(store_url="sqlite://", num_workers=1, max_body_bytes=1 << 20)
    with running(settings, ThreadExecutor(solve)) as started:
        yield started


@pytest.fixture(scope="session")
def program() -> Callable[[str], Executor]:
    """An executor that runs one of the programs next to this file."""

    def executor(name: str) -> Executor:
        return ProcessExecutor([sys.executable, str(PROGRAMS / f"{name}.py")])

    return executor


@pytest.fixture(scope="session")
def recording() -> Callable[[Executor], Recording]:
    return Recording


class _Mlp(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, width)
        self.down = torch.nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return down.sum()


class _NoParameters(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).sum()


@pytest.fixture(scope="session")
def make_graph() -> Callable[[int], bytes]:
    """A two-layer perceptron of a given width as a .pt2 archive."""
    made: dict[int, bytes] = {}

    def make(width: int) -> bytes:
        if width not in made:
            made[width] = export_model(_Mlp(width), (torch.zeros(8, 16),))
        return made[width]

    return make


@pytest.fixture(scope="session")
def graph(make_graph: Callable[[int], bytes]) -> bytes:
    return make_graph(64)


@pytest.fixture(scope="session")
def graph_without_parameters() -> bytes:
    return export_model(_NoParameters(), (torch.zeros(8, 16),))
