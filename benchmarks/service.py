"""A single measurement of the service: a new request, then repetitions of it.

The service runs in another process with an empty cache. "answer" is the time of the HTTP request;
"plan" is the time until a new client has read the plan, and "again" that of a repeated request of
the same client.

With a number of `workers`, plans that are not cached are measured instead: one at a time, and many
at once. Each is for another bandwidth, so that no solved block is in the cache either.
"""

import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import psutil

from autoshard.cli.commands.demo import service
from autoshard.client import Client
from autoshard.errors import AutoshardError
from autoshard.plan import PlanOptions


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a first request and of each repetition.

    Args:
        case: `archive`, a path; `mesh`; `options`; and the number of `repetitions`.
    """
    data = Path(case["archive"]).read_bytes()
    options = PlanOptions(**case["options"])
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as url:
        plans, again = [], []
        for _ in range(1 + case["repetitions"]):
            with Client(url, timeout=case["options"]["time_limit"] + 60) as client:
                # Opens the connection, which takes longer than a response.
                client.health()
                plans.append(_client_seconds(client, data, case["mesh"], options))
                again.append(_client_seconds(client, data, case["mesh"], options))
        (first, _), *others = plans
        with httpx2.Client(base_url=url, timeout=60.0) as http:
            _answer_seconds(http, data, case)
            answers = [_answer_seconds(http, data, case) for _ in range(case["repetitions"])]
    return {
        "first": first,
        "plan": [seconds for seconds, _ in others],
        "again": [seconds for seconds, _ in again],
        "answer": [seconds for seconds, _, _ in answers],
        "hits": all(cached for _, cached in (*others, *again))
        and all(cached for _, cached, _ in answers),
        "archive_bytes": len(data),
        "answer_bytes": answers[-1][2],
    }


def _client_seconds(
    client: Client, data: bytes, mesh: list[int], options: PlanOptions
) -> tuple[float, bool]:
    start = time.perf_counter()
    result = client.request_plan(data, mesh=mesh, options=options)
    return time.perf_counter() - start, result.cached


def _answer_seconds(
    http: httpx2.Client, data: bytes, case: dict[str, Any]
) -> tuple[float, bool, int]:
    request = json.dumps({"mesh": {"shape": case["mesh"]}, "options": _options(case)})
    files: dict[str, tuple[str | None, bytes]] = {
        "graph": ("graph", data),
        "request": (None, request.encode()),
    }
    start = time.perf_counter()
    response = http.post("/v1/plans", files=files)
    seconds = time.perf_counter() - start
    cached = response.headers.get("Autoshard-Cache") == "hit"
    return seconds, cached, len(response.content)


def measure_misses(case: dict[str, Any]) -> dict[str, Any]:
    """Plans that are not cached: seconds of one, and plans per second.

    Args:
        case: `archive`, a path; `mesh`; `options`; the number of `workers` of the service, of
            `clients` at once, and of `requests`.
    """
    data = Path(case["archive"]).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    os.environ["AUTOSHARD_NUM_WORKERS"] = str(case["workers"])
    requests = _requests(digest, case)
    with (
        tempfile.TemporaryDirectory() as folder,
        service(Path(folder)) as url,
        httpx2.Client(base_url=url, timeout=600.0) as http,
    ):
        http.put(f"/v1/graphs/{digest}", content=data)
        alone = [_miss(http, next(requests)) for _ in range(1 + case["requests"])][1:]
        several = list(itertools.islice(requests, case["requests"]))
        (process,) = (p for p in psutil.Process().children() if "autoshard_server" in p.cmdline())
        before = _processor_seconds(process)
        start = time.perf_counter()
        with ThreadPoolExecutor(case["clients"]) as pool:
            list(pool.map(lambda request: _miss(http, request), several))
        wall = time.perf_counter() - start
        used = _processor_seconds(process) - before
    return {
        "total": median(alone),
        "rate": len(several) / wall,
        "processor": used / len(several),
    }


def _options(case: dict[str, Any]) -> dict[str, Any]:
    """The options of a case as a document."""
    return PlanOptions(**case["options"]).model_dump(mode="json")


def _requests(digest: str, case: dict[str, Any]) -> Iterator[str]:
    """Requests that differ in the bandwidth within a node."""
    for number in itertools.count():
        bandwidths = {"intra_bandwidth": 4e11 + number * 1e6, "inter_bandwidth": 5e10}
        mesh = {"shape": case["mesh"], **bandwidths}
        yield json.dumps({"graph_sha256": digest, "mesh": mesh, "options": _options(case)})


def _miss(http: httpx2.Client, request: str) -> float:
    """Seconds of a request whose plan is not cached."""
    headers = {"Content-Type": "application/json"}
    start = time.perf_counter()
    accepted = http.post("/v1/plans", content=request, headers=headers)
    if accepted.status_code != httpx2.codes.ACCEPTED:
        raise AutoshardError(f"expected a job, got {accepted.status_code}: {accepted.text[:200]}")
    made = http.post("/v1/plans", content=request, headers={**headers, "Prefer": "wait=60"})
    if made.status_code != httpx2.codes.OK:
        raise AutoshardError(f"expected a plan, got {made.status_code}: {made.text[:200]}")
    return time.perf_counter() - start


def _processor_seconds(process: psutil.Process) -> float:
    """Processor time of a process, its descendants, and those that have ended."""
    used = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used += sum(each.cpu_times()[:4])
    return used


def main() -> int:
    """Measure the case of the only argument, and print the result."""
    try:
        case = json.loads(sys.argv[1])
        result = measure_misses(case) if "workers" in case else measure(case)
    except AutoshardError as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
