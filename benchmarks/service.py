"""One measurement of the service: a request that is new to it, then the same one again.

The service is a process of its own with an empty cache. "answer" is the time until the
whole response to the graph is there; "plan" is what a client that has not seen the plan
needs until it has read it, and "again" what it needs for asking once more.
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


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a first request and of each repetition.

    Args:
        asked: `archive`, a path; `mesh`; `options`; and the number of `repetitions`.
    """
    data = Path(asked["archive"]).read_bytes()
    options = PlanOptions.model_validate(asked["options"])
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as url:
        plans, again = [], []
        for _ in range(1 + asked["repetitions"]):
            with Client(url, timeout=asked["options"]["time_limit"] + 60) as client:
                # Opens the connection, which takes longer than an answer.
                client.health()
                plans.append(_client_seconds(client, data, asked["mesh"], options))
                again.append(_client_seconds(client, data, asked["mesh"], options))
        (first, _), *others = plans
        with httpx2.Client(base_url=url, timeout=60.0) as http:
            _answer_seconds(http, data, asked)
            answers = [_answer_seconds(http, data, asked) for _ in range(asked["repetitions"])]
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
    http: httpx2.Client, data: bytes, asked: dict[str, Any]
) -> tuple[float, bool, int]:
    request = json.dumps({"mesh": {"shape": asked["mesh"]}, "options": asked["options"]})
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
    """Measure what the only argument asks for, and print the result."""
    try:
        result = measure(json.loads(sys.argv[1]))
    except AutoshardError as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
