"""Processor time of a service with many open event streams.

    python -m benchmarks.streams [STREAMS ...]

A service runs in a process of its own, and this process opens real connections to it: each follows
one of 20 jobs. Two of these run and report progress every second, the others wait.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import psutil

from autoshard_server.settings import Settings
from autoshard_server.store.database import Stores

_JOBS = 20
_RUNNING = 2
_SECONDS = 20.0
_SETTLING = 8.0


def measure(streams: int) -> tuple[float, int]:
    """Share of a processor that the service uses, and the number of events that arrived.

    Args:
        streams: open connections.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(store_url=f"sqlite:///{Path(folder) / 'store.sqlite3'}")
        stores = Stores(settings)
        jobs = [stores.jobs.submit(str(i), "{}", b"", max_queued=_JOBS).id for i in range(_JOBS)]
        environment = {
            "AUTOSHARD_STORE_URL": settings.store_url,
            "AUTOSHARD_NUM_WORKERS": "0",
            "AUTOSHARD_LEASE": "3600",
            "AUTOSHARD_MAX_CALLER_STREAMS": str(streams),
        }
        command = [sys.executable, "-m", "autoshard_server", "--port", "0"]
        service = subprocess.Popen(  # noqa: S603  this package's own program
            command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True
        )
        try:
            port = _port(service)
            return asyncio.run(_follow(stores, service.pid, port, jobs, streams))
        finally:
            service.terminate()
            service.wait()
            stores.close()


async def _follow(
    stores: Stores, pid: int, port: int, jobs: list[str], streams: int
) -> tuple[float, int]:
    events = 0

    async def stream(job_id: str) -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        path = f"/v1/jobs/{job_id}/events"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(status.decode())
        while line := await reader.readline():
            events += line.startswith(b"data:")

    opened = []
    for i in range(streams):
        opened.append(asyncio.create_task(stream(jobs[i % len(jobs)])))
        await asyncio.sleep(0.002)
    claims = [stores.jobs.claim("benchmark") for _ in range(_RUNNING)]
    await asyncio.sleep(_SETTLING)
    process = psutil.Process(pid)
    before, started, arrived = process.cpu_times(), time.monotonic(), events
    while (now := time.monotonic()) - started < _SECONDS:
        for claim in claims:
            if claim is None or not stores.jobs.renew(claim, {"phase": f"at {now:.0f}"}):
                raise RuntimeError("the job is not running")
        await asyncio.sleep(1.0)
    after, elapsed = process.cpu_times(), time.monotonic() - started
    for task in opened:
        if task.done():
            task.result()
        task.cancel()
    used = after.user + after.system - before.user - before.system
    return used / elapsed, events - arrived


def _port(service: subprocess.Popen[str]) -> int:
    """The port that the service logs when it listens."""
    assert service.stderr is not None
    for line in service.stderr:
        for word in line.replace('"', " ").split():
            if word.startswith("http://"):
                port = urlsplit(word).port
                if port:
                    _drain(service)
                    return port
    raise RuntimeError("the service did not start")


def _drain(service: subprocess.Popen[str]) -> None:
    """Read the log in a thread, so that the service does not wait for its reader."""
    assert service.stderr is not None
    Thread(target=service.stderr.read, daemon=True).start()


def main() -> None:
    """Measure the numbers of streams of the arguments."""
    for streams in map(int, sys.argv[1:] or ("50", "200", "600", "1000")):
        share, events = measure(streams)
        print(f"{streams:5d} streams: {100 * share:6.1f} % of a processor, {events} events")


if __name__ == "__main__":
    main()
