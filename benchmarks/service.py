"""A single measurement of the service: a new request, then repetitions of it.

The service runs in another process with an empty cache. "answer" is the time of the HTTP request;
"plan" is the time until a new client has read the plan, and "again" that of a repeated request of
the same client.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

from autoshard.cli.demo import service
from autoshard.client import Client
from autoshard.errors import AutoshardError
from autoshard.plan import PlanOptions


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a first request and of each repetition.

    Args:
        case: `archive`, a path; `mesh`; `options`; and the number of `repetitions`.
    """
    data = Path(case["archive"]).read_bytes()
    options = PlanOptions.model_validate(case["options"])
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
    request = json.dumps({"mesh": {"shape": case["mesh"]}, "options": case["options"]})
    files: dict[str, tuple[str | None, bytes]] = {
        "graph": ("graph", data),
        "request": (None, request.encode()),
    }
    start = time.perf_counter()
    response = http.post("/v1/plans", files=files)
    seconds = time.perf_counter() - start
    cached = response.headers.get("Autoshard-Cache") == "hit"
    return seconds, cached, len(response.content)


def main() -> int:
    """Measure the case of the only argument, and print the result."""
    try:
        result = measure(json.loads(sys.argv[1]))
    except AutoshardError as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
