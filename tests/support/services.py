"""Services on real sockets, and a small program for them."""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from autoshard_server import Executor, Settings, ThreadExecutor, create_app
from autoshard_server.solvers.solving import solve
from autoshard_server.store.jobs import JobKind
from autoshard_solver_cache import NamespacedCache, SolverCache, open_engine

ONE_WORKER: Mapping[str, Any] = {
    "num_workers": 1,
    "num_quick_workers": 0,
    "num_reserve_workers": 0,
}
"""Settings of a service with a single worker, so that the order of its solvers is known."""


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return (down * scale).sum()


@contextmanager
def serving(executor: Executor, **settings: Any) -> Iterator[str]:
    """A service in a thread; yields its address."""
    given = {**ONE_WORKER, "store_url": "sqlite://", "shutdown_grace": 0, **settings}
    with listening(create_app(Settings(**given), executor=executor)) as url:
        yield url


@contextmanager
def keeping(folder: Path) -> Iterator[str]:
    """A service that solves in threads, whose searches keep plans where it keeps its own."""
    store = f"sqlite:///{folder / 'store.sqlite3'}"
    engine = open_engine(store)
    plans = NamespacedCache(SolverCache(engine), JobKind.PLAN.namespace)

    def slowed(work: Any, report: Callable[[Mapping[str, Any]], None], cancel: Event) -> Any:
        def slowly(progress: Mapping[str, Any]) -> None:
            report(progress)
            if progress["phase"] == "planned 1 of 2 meshes":
                # Progress is written down from time to time only.
                cancel.wait(0.6)

        return solve(work, slowly, cancel, plans=plans)

    with serving(ThreadExecutor(slowed), store_url=store, retry_after=1) as url:
        yield url
    engine.dispose()


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """An application in a thread, on a port that was free; yields its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=5)
    )
    thread = Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the service did not start"
            sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
