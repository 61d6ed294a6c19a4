"""The service that is attacked, its callers, and what is measured of it meanwhile."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

import httpx2
import psutil

from autoshard_server import Settings
from autoshard_server.store.database import Stores
from benchmarks.faults.harness import Service

_TIMEOUT = 300.0
_SAMPLE = 0.25


@dataclass(frozen=True)
class Outcome:
    """Outcome of a row of the table.

    Attributes:
        text: for the table.
        holds: true if it is as it should be.
    """

    text: str
    holds: bool


@dataclass
class Target:
    """A running service.

    Attributes:
        process: the service.
        url: of its database.
        keys: API key of each caller.
        folder: for files of the attacks.
    """

    process: Service
    url: str
    keys: Mapping[str, str]
    folder: Path

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.process.address)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def http(self, caller: str) -> httpx2.Client:
        """A client with the key of a caller."""
        headers = {"Authorization": f"Bearer {self.keys[caller]}"}
        return httpx2.Client(base_url=self.process.address, headers=headers, timeout=_TIMEOUT)

    def connect(self, timeout: float = 30.0) -> socket.socket:
        """A connection without a request."""
        return socket.create_connection(self.address, timeout)


@contextmanager
def target(
    folder: Path, url: str, callers: Mapping[str, str], **settings: object
) -> Iterator[Target]:
    """A service with a key for each caller.

    Args:
        folder: for files.
        url: of its database.
        callers: project of each caller, by name.
        **settings: of the service.
    """
    stores = Stores(Settings(store_url=url))
    keys = {
        name: stores.api_keys.create(name, ["admin"], project=project)[1]
        for name, project in callers.items()
    }
    stores.close()
    with Service(url, auth="required", **settings) as process:
        yield Target(process, url, keys, folder)


@dataclass
class Watched:
    """Measurements of a service while attacks ran.

    Attributes:
        liveness: seconds of each response of /livez.
        server: resident bytes of the process that answers, at most.
        total: bytes of all processes of the service, at most; shared pages count once.
        seconds: of the attacks.
    """

    liveness: list[float] = field(default_factory=list)
    server: int = 0
    total: int = 0
    seconds: float = 0.0

    def quantile(self, share: float) -> float:
        """Quantile of the responses of /livez, in seconds."""
        ordered = sorted(self.liveness)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@contextmanager
def watching(attacked: Target) -> Iterator[Watched]:
    """Measure a service within a `with` block."""
    found, is_over, begun = Watched(), Event(), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.hostile.probe", *map(str, attacked.address)]
    sampler = Thread(target=_sample, args=(attacked.process.pid, found, is_over))
    sampler.start()
    with subprocess.Popen(  # noqa: S603  a constant command
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Linux shares processors among sessions: it is none of the attackers'.
        start_new_session=True,
    ) as probe:
        try:
            yield found
        finally:
            text, _ = probe.communicate()
            found.liveness = json.loads(text)
            found.seconds = time.perf_counter() - begun
            is_over.set()
            sampler.join()


def _sample(pid: int, found: Watched, is_over: Event) -> None:
    server = psutil.Process(pid)
    while not is_over.wait(_SAMPLE):
        found.server = max(found.server, server.memory_info().rss)
        total = 0
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
        found.total = max(found.total, total)


def processor_share(pid: int, seconds: float) -> float:
    """Share of one processor that a process takes."""
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / seconds
