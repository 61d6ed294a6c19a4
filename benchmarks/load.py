"""How many requests a second a service answers that knows the answers, and how soon.

The service and the clients run on this machine, and share its processors. Each client holds
one connection and asks again when it has been answered. `python -m benchmarks.load` writes the
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

from autoshard.cli.demo import service
from autoshard.graph import export_model
from benchmarks.document import caption, replace_table

_DOCUMENT = Path(__file__).parent.parent / "docs" / "reliability.md"
_JSON = {"Content-Type": "application/json"}
_LIMIT = 1 << 26


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that is sent over and over.

    Attributes:
        name: for the table.
        head: request line and headers.
        body: of the request.
        status: that every answer must have.
    """

    name: str
    head: bytes
    body: bytes
    status: int


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a load.

    Attributes:
        seconds: from each request to its whole answer.
        elapsed: seconds from the first request to the last answer.
        failures: answers with another status.
        nbytes: of one answer, as sent.
    """

    seconds: Sequence[float]
    elapsed: float
    failures: int
    nbytes: int

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.seconds) / self.elapsed

    def quantile(self, share: float) -> float:
        """Seconds within which that share of all answers came."""
        return sorted(self.seconds)[min(int(share * len(self.seconds)), len(self.seconds) - 1)]


async def load(url: str, ask: Ask, *, clients: int, duration: float) -> Load:
    """Ask from so many connections at once, for so many seconds."""
    address = urlsplit(url)
    times: list[float] = []
    failures = 0
    nbytes = 0
    end = time.perf_counter() + duration

    async def client() -> None:
        nonlocal failures, nbytes
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=_LIMIT)
        request = ask.head + ask.body
        while (start := time.perf_counter()) < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = _length(head)
            if length:
                await reader.readexactly(length)
            times.append(time.perf_counter() - start)
            failures += int(head[9:12]) != ask.status
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


def measure(clients: int, duration: float) -> list[tuple[Ask, Load]]:
    """Loads on a service that knows a plan of GPT-2."""
    archive = _gpt2()
    digest = hashlib.sha256(archive).hexdigest()
    asked = {"graph_sha256": digest, "mesh": {"shape": [2, 4]}}
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as url:
        with httpx2.Client(base_url=url, timeout=300) as http:
            http.put(f"/v1/graphs/{digest}", content=archive).raise_for_status()
            made = http.post("/v1/plans", json=asked, headers={"Prefer": "wait=60"})
            plan_id = made.raise_for_status().json()["id"]
        asks = _asks(plan_id, json.dumps(asked).encode())
        found = []
        for ask in asks:
            asyncio.run(load(url, ask, clients=clients, duration=duration / 5))
            found.append((ask, asyncio.run(load(url, ask, clients=clients, duration=duration))))
        return found


def _asks(plan_id: str, body: bytes) -> list[Ask]:
    plan = f"/v1/plans/{plan_id}"
    zstd = {"Accept-Encoding": "zstd"}
    known = {"If-None-Match": f'"{plan_id}"'}
    return [
        _ask("POST /v1/plans:lookup", "POST", "/v1/plans:lookup", _JSON, body),
        _ask("GET /v1/plans/{id}, which the caller has", "GET", plan, known, status=304),
        _ask("POST /v1/plans, answer in zstd", "POST", "/v1/plans", _JSON | zstd, body),
        _ask("POST /v1/plans, answer as it is", "POST", "/v1/plans", _JSON, body),
        _ask("GET /v1/plans/{id}, answer in zstd", "GET", plan, zstd),
    ]


def _ask(
    name: str,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes = b"",
    *,
    status: int = 200,
) -> Ask:
    sent = {"Host": "autoshard", **headers}
    if body:
        sent["Content-Length"] = str(len(body))
    lines = "".join(f"{key}: {value}\r\n" for key, value in sent.items())
    return Ask(name, f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode(), body, status)


def _gpt2() -> bytes:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        ids = torch.zeros(8, 1024, dtype=torch.long)
    return export_model(model, (), {"input_ids": ids, "labels": ids, "use_cache": False})


def _table(found: Sequence[tuple[Ask, Load]]) -> str:
    rows = [
        "| request | bytes of an answer | requests/s | median | p99 | wrong |",
        "|---|---|---|---|---|---|",
    ]
    for ask, result in found:
        median = statistics.median(result.seconds) * 1e3
        rows.append(
            f"| `{ask.name}` | {result.nbytes:,} | {result.rate:,.0f} | {median:.1f} ms "
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
        text = options.document.read_text(encoding="utf-8")
        options.document.write_text(replace_table(text, "load", f"{head}\n\n{table}"), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
