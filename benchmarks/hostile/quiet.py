"""Rows that are measured on a service that nobody attacks at the same time."""

import hashlib
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median

import httpx2
from sqlalchemy import text

from autoshard_server.store.database import newest_revision
from autoshard_solver_cache import open_engine
from benchmarks.faults.harness import Service, graph_of
from benchmarks.hostile import archives
from benchmarks.hostile.storm import ATTACKER, OTHER, plan_request, result_of, timed
from benchmarks.hostile.target import Outcome, Target, processor_share, target

_ROOT = Path(__file__).parents[2]
_STREAMS, _STREAMERS = 1000, 20
_MISSES = 16
_RATE = 4.0
"""Misses per second, at least."""

_SHARE = 0.1
"""Share of a processor for the streams, at most."""

_SECONDS = 0.05
"""Seconds of a request on a large database, at most."""

_LINE = 1000
"""Largest number of characters of a start-up error."""


def misses(attacked: Target) -> Outcome:
    """GPT-2 on 2x4 with another seed each time: one on an idle service, then 16 of 4 callers."""
    archive = archives.gpt2()
    digest = hashlib.sha256(archive).hexdigest()

    def plan(seed: int) -> float:
        with attacked.http(OTHER) as http:
            seconds, job = timed(
                lambda: result_of(http, plan_request(digest, [2, 4], seed=seed), 99)
            )
        if job["state"] != "succeeded":
            raise RuntimeError(str(job)[:500])
        return float(seconds)

    with attacked.http(OTHER) as http:
        http.put(f"/v1/graphs/{digest}", content=archive).raise_for_status()
    plan(1)
    alone = median(plan(seed) for seed in range(2, 7))
    with ThreadPoolExecutor(4) as pool:
        begun = time.perf_counter()
        list(pool.map(plan, range(10, 10 + _MISSES)))
        rate = _MISSES / (time.perf_counter() - begun)
    return Outcome(f"{rate:.1f} a second with 2 workers; {alone:.2f} s alone", rate >= _RATE)


def streams(attacked: Target) -> Outcome:
    """1,000 event streams of 20 callers on jobs that wait."""
    callers = {f"caller-{number}": f"project-{number}" for number in range(_STREAMERS)}
    url = f"sqlite:///{attacked.folder / 'streams.sqlite3'}"
    small = graph_of(41)
    digest = hashlib.sha256(small).hexdigest()
    limits = {"num_workers": 0, "max_connections": 4096}
    with target(attacked.folder, url, callers, **limits) as waiting, ExitStack() as stack:
        statuses = Counter[int]()
        for caller in callers:
            http = stack.enter_context(waiting.http(caller))
            http.put(f"/v1/graphs/{digest}", content=small).raise_for_status()
            path = http.post("/v1/plans", json=plan_request(digest, [2, 2])).headers["Location"]
            for _ in range(_STREAMS // _STREAMERS):
                statuses[_open_stream(waiting, stack, caller, f"{path}/events")] += 1
        time.sleep(2.0)
        share = processor_share(waiting.process.pid, 10.0)
    opened = statuses[httpx2.codes.OK]
    return Outcome(
        f"{opened} streams: {100 * share:.0f} % of a processor",
        share < _SHARE and opened == _STREAMS,
    )


def _open_stream(waiting: Target, stack: ExitStack, caller: str, path: str) -> int:
    connection = stack.enter_context(waiting.connect())
    lines = (
        f"GET {path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {waiting.keys[caller]}",
        "",
        "",
    )
    connection.sendall("\r\n".join(lines).encode())
    return int(connection.recv(65_536)[9:12] or 0)


def many_rows(attacked: Target) -> Outcome:
    """/metrics and the submission of a job, on a database with many plans and jobs."""
    small = graph_of(42)
    digest = hashlib.sha256(small).hexdigest()
    with attacked.http(OTHER) as http:
        http.put(f"/v1/graphs/{digest}", content=small).raise_for_status()
        scrapes = [timed(lambda: http.get("/metrics"))[0] for _ in range(9)]
        asked = [plan_request(digest, [2, 2], seed=seed) for seed in range(9)]
        submits = [timed(partial(http.post, "/v1/plans", json=one))[0] for one in asked]
    found = median(scrapes), median(submits)
    text_ = f"/metrics {found[0] * 1e3:.0f} ms, submit {found[1] * 1e3:.0f} ms (medians)"
    return Outcome(text_, max(found) < _SECONDS)


def results_of_jobs(attacked: Target) -> Outcome:
    """The bytes of results that are stored with jobs."""
    path = attacked.url.removeprefix("sqlite:///")
    query = "SELECT COUNT(*), COALESCE(SUM(LENGTH(result)), 0) FROM jobs WHERE state = 'succeeded'"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        count, nbytes = connection.execute(
            f"{query} AND caller IN ('{OTHER}', '{ATTACKER}')"
        ).fetchone()
    return Outcome(
        f"{nbytes:,} bytes for {count} jobs with a cached result", nbytes < 10_000 * count
    )


def evictions(attacked: Target) -> Outcome:
    """4 uploads padded to 5 MB, with a cache of 20 MB."""
    url = f"sqlite:///{attacked.folder / 'evictions.sqlite3'}"
    callers = {ATTACKER: "one", OTHER: "two"}
    small = graph_of(43)
    digest = hashlib.sha256(small).hexdigest()
    with target(attacked.folder, url, callers, cache_max_bytes=20_000_000) as crowded:
        with crowded.http(OTHER) as http:
            http.put(f"/v1/graphs/{digest}", content=small).raise_for_status()
            plan = result_of(http, plan_request(digest, [2, 2]), 60.0)["result"]["id"]
        with crowded.http(ATTACKER) as http:
            for number in range(4):
                body = archives.padded(small, 5_000_000, number)
                http.put(f"/v1/graphs/{hashlib.sha256(body).hexdigest()}", content=body)
        time.sleep(3.0)
        with crowded.http(OTHER) as http:
            found = [
                http.get(path).status_code for path in (f"/v1/plans/{plan}", f"/v1/graphs/{digest}")
            ]
    return Outcome(f"the other's plan {found[0]}, graph {found[1]}", found == [200, 200])


def others_resources(attacked: Target) -> Outcome:
    """Cancel, replace and delete what belongs to another project, then one's own."""
    small = graph_of(44)
    digest = hashlib.sha256(small).hexdigest()
    with attacked.http(OTHER) as own, attacked.http(ATTACKER) as other:
        own.put(f"/v1/graphs/{digest}", content=small).raise_for_status()
        plan = result_of(own, plan_request(digest, [2, 2]), 60.0)["result"]["id"]
        job = own.get("/v1/jobs", params={"page_size": 1}).json()["jobs"][0]["id"]
        topology = own.get("/v1/topologies/h100-sxm").json() | {"name": "ours"}
        own.put("/v1/topologies/ours", json=topology).raise_for_status()
        tried = {
            "cancel": other.post(f"/v1/jobs/{job}:cancel"),
            "topology": other.delete("/v1/topologies/ours"),
            "plan": other.get(f"/v1/plans/{plan}"),
            "delete": other.delete(f"/v1/plans/{plan}"),
            "graph": other.delete(f"/v1/graphs/{digest}"),
        }
        owned = [own.delete(f"/v1/{path}") for path in (f"plans/{plan}", f"graphs/{digest}")]
    refused = all(response.status_code == httpx2.codes.NOT_FOUND for response in tried.values())
    deleted = [response.status_code for response in owned]
    text_ = ", ".join(f"{name} {response.status_code}" for name, response in tried.items())
    return Outcome(
        f"{text_}; deleting one's own {deleted}",
        refused and set(deleted) == {httpx2.codes.NO_CONTENT},
    )


def newer_migration(attacked: Target) -> Outcome:
    """A newer compatible release migrates the database of a running server."""
    url = f"sqlite:///{attacked.folder / 'newer.sqlite3'}"
    with Service(url, num_workers=0) as service:
        engine = open_engine(url)
        with engine.begin() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
            needed = {"needed": newest_revision()}
            connection.execute(text("UPDATE compatibility SET min_compatible = :needed"), needed)
        engine.dispose()
        time.sleep(3.0)
        status = httpx2.get(f"{service.address}/readyz", timeout=30).status_code
    return Outcome(f"/readyz {status}", status == httpx2.codes.OK)


def slips(attacked: Target) -> Outcome:
    """A misspelt variable, a database that is down, and a port that is taken."""
    port = str(attacked.address[1])
    down = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    store = {"AUTOSHARD_STORE_URL": "sqlite://"}
    found = {
        "variable": _start({**store, "AUTOSHARD_NUM_WORKER": "5"}, "0"),
        "database": _start({"AUTOSHARD_STORE_URL": down}, "0"),
        "port": _start(store, port),
    }
    short = {
        name: "\n" not in error and len(error) < _LINE and "Traceback" not in error and status != 0
        for name, (status, error) in found.items()
    }
    text_ = ", ".join(
        f"{name}: status {found[name][0]}, {len(found[name][1])} characters" for name in found
    )
    return Outcome(text_, all(short.values()) and "NUM_WORKERS" in found["variable"][1])


def _start(environment: dict[str, str], port: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "autoshard_server", "--port", port]
    try:
        done = subprocess.run(  # noqa: S603  a constant command
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return 0, "it runs"
    return done.returncode, done.stderr.strip()


def _tested(path: str) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    done = subprocess.run(  # noqa: S603  a constant command
        command, cwd=_ROOT, capture_output=True, text=True, check=False
    )
    last = (done.stdout.strip() or "no output").splitlines()[-1]
    return Outcome(f"`{path}`: {last.strip('= ')}", done.returncode == 0)


def generated_clients(_attacked: Target) -> Outcome:
    """Python and TypeScript clients that are generated from the specification."""
    return _tested("tests/server/test_generated_clients.py")


def reverse_proxy(_attacked: Target) -> Outcome:
    """A reverse proxy, nginx, with a service under /plan/."""
    return _tested("tests/server/test_reverse_proxy.py")


BEFORE_STORM: tuple[Callable[[Target], Outcome], ...] = (
    misses,
    many_rows,
)
"""Rows on the service before it is attacked."""

AFTER_STORM: tuple[Callable[[Target], Outcome], ...] = (
    results_of_jobs,
    others_resources,
    streams,
    evictions,
    newer_migration,
    slips,
    generated_clients,
    reverse_proxy,
)
"""Rows after the attacks, most on services of their own."""
