"""Load test of a service whose results are cached: requests per second, and latencies.

The service and the clients run on this machine and share its processors. Each client has one
connection and sends the next request after each response. `python -m benchmarks.load` writes the
result into docs/reliability.md.
"""

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autoshard.cli.commands.demo import service
from autoshard.graph import export_model
from benchmarks.document import DOCS, caption, write_table

_DOCUMENT = DOCS / "reliability.md"
_JSON = {"Content-Type": "application/json"}
_LIMIT = 1 << 26


@dataclass(frozen=True, slots=True)
class RepeatedRequest:
    """A request that is sent repeatedly.

    Attributes:
        name: for the table.
        head: request line and headers.
        body: of the request.
        status: expected of every response.
    """

    name: str
    head: bytes
    body: bytes
    status: int


@dataclass(frozen=True, slots=True)
class Load:
    """Result of a load test.

    Attributes:
        seconds: latency of each request, to the end of its response.
        elapsed: seconds from the first request to the last response.
        failures: number of responses with another status.
        nbytes: bytes of one response, as sent.
    """

    seconds: Sequence[float]
    elapsed: float
    failures: int
    nbytes: int

    @property
    def rate(self) -> float:
        """Responses per second."""
        return len(self.seconds) / self.elapsed

    def quantile(self, share: float) -> float:
        """Quantile of the latencies, in seconds."""
        return sorted(self.seconds)[min(int(share * len(self.seconds)), len(self.seconds) - 1)]


async def load(url: str, repeated: RepeatedRequest, *, clients: int, duration: float) -> Load:
    """Send requests on concurrent connections, for a number of seconds."""
    address = urlsplit(url)
    times: list[float] = []
    failures = 0
    nbytes = 0
    end = time.perf_counter() + duration

    async def client() -> None:
        nonlocal failures, nbytes
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=_LIMIT)
        request = repeated.head + repeated.body
        while (start := time.perf_counter()) < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = _length(head)
            if length:
                await reader.readexactly(length)
            times.append(time.perf_counter() - start)
            failures += int(head[9:12]) != repeated.status
            nbytes = len(head) + length
        writer.close()
        await writer.wait_closed()

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(times, time.perf_counter() - begun, failures, nbytes)


def _length(head: bytes) -> int:
    lowered = head.lower()
    at = lowered.find(b"content-length: ")
    return 0 if at < 0 else int(lowered[at + 16 : lowered.index(b"\r\n", at)])


def measure(clients: int, duration: float) -> list[tuple[RepeatedRequest, Load]]:
    """Load tests of a service that has a plan of GPT-2."""
    archive = _gpt2()
    digest = hashlib.sha256(archive).hexdigest()
    asked = {"graph_sha256": digest, "mesh": {"shape": [2, 4]}}
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as url:
        with httpx2.Client(base_url=url, timeout=300) as http:
            http.put(f"/v1/graphs/{digest}", content=archive).raise_for_status()
            made = http.post("/v1/plans", json=asked, headers={"Prefer": "wait=60"})
            plan_id = made.raise_for_status().json()["id"]
        requests = _requests(plan_id, json.dumps(asked).encode())
        found = []
        for repeated in requests:
            asyncio.run(load(url, repeated, clients=clients, duration=duration / 5))
            found.append(
                (repeated, asyncio.run(load(url, repeated, clients=clients, duration=duration)))
            )
        return found


def _requests(plan_id: str, body: bytes) -> list[RepeatedRequest]:
    plan = f"/v1/plans/{plan_id}"
    zstd = {"Accept-Encoding": "zstd"}
    known = {"If-None-Match": f'"{plan_id}"'}
    return [
        _request("POST /v1/plans:lookup", "POST", "/v1/plans:lookup", _JSON, body),
        _request("GET /v1/plans/{id}, not modified", "GET", plan, known, status=304),
        _request("POST /v1/plans, response in zstd", "POST", "/v1/plans", _JSON | zstd, body),
        _request("POST /v1/plans, response uncompressed", "POST", "/v1/plans", _JSON, body),
        _request("GET /v1/plans/{id}, response in zstd", "GET", plan, zstd),
    ]


def _request(
    name: str,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes = b"",
    *,
    status: int = 200,
) -> RepeatedRequest:
    sent = {"Host": "autoshard", **headers}
    if body:
        sent["Content-Length"] = str(len(body))
    lines = "".join(f"{key}: {value}\r\n" for key, value in sent.items())
    return RepeatedRequest(name, f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode(), body, status)


def _gpt2() -> bytes:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        ids = torch.zeros(8, 1024, dtype=torch.long)
    return export_model(model, (), {"input_ids": ids, "labels": ids, "use_cache": False})


def _table(found: Sequence[tuple[RepeatedRequest, Load]]) -> str:
    rows = [
        "| request | bytes of a response | requests/s | median | p99 | wrong |",
        "|---|---|---|---|---|---|",
    ]
    for repeated, result in found:
        median = statistics.median(result.seconds) * 1e3
        rows.append(
            f"| `{repeated.name}` | {result.nbytes:,} | {result.rate:,.0f} | {median:.1f} ms "
            f"| {result.quantile(0.99) * 1e3:.1f} ms | {result.failures} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--clients", type=int, default=8, help="connections")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds per request")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    options = parser.parse_args()
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    how = f"{options.clients} connections, {options.duration:g} s each, niceness {priority}"
    head = caption(how)
    table = _table(measure(options.clients, options.duration))
    print(table)
    if options.document.exists():
        write_table(options.document, "load", f"{head}\n\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
