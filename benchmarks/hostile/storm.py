"""Attacks that run at the same time, each as strangers would make it."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import httpx2

from benchmarks.faults.harness import graph_of
from benchmarks.hostile import archives
from benchmarks.hostile.floods import ATTACKER, FLOODS, OTHER
from benchmarks.hostile.target import Outcome, Target

_JSON = {"Content-Type": "application/json"}
_ZSTD = {"Content-Encoding": "zstd"}
_IDLE = 1100
_IDLE_SECONDS = 15.0
_MOST_JOBS = 500
_FAIR = 2.0
"""Seconds that another caller may wait, at most."""

_CLIENT_ERROR, _SERVER_ERROR, _TOO_MANY = 400, 500, 429


def many_axes(attacked: Target) -> Outcome:
    """20 look-ups with a mesh of 520,000 axes."""
    body, seconds, statuses = archives.ones(), [], Counter[int]()
    with attacked.http(ATTACKER) as http:
        for _ in range(20):
            taken, response = timed(
                lambda: http.post("/v1/plans:lookup", content=body, headers=_JSON | _ZSTD)
            )
            seconds.append(taken)
            statuses[response.status_code] += 1
    text = f"{_counts(statuses)}; at most {max(seconds):.2f} s each"
    return Outcome(text, _are_refused(statuses) and max(seconds) < 1.0)


def empty_objects(attacked: Target) -> Outcome:
    """Two uploads of 62.7 MB of empty objects, compressed to 5.8 KB."""
    digest, body = archives.empty_objects()
    return _uploads(attacked, digest, body, _ZSTD, number=2)


def large_model(attacked: Target) -> Outcome:
    """A zip of 31 MB with a model.json of 258 MB."""
    body = archives.large_model()
    return _uploads(attacked, hashlib.sha256(body).hexdigest(), body, {}, number=1)


def _uploads(
    attacked: Target, digest: str, body: bytes, headers: dict[str, str], *, number: int
) -> Outcome:
    def upload(_: int) -> tuple[float, httpx2.Response]:
        with attacked.http(ATTACKER) as http:
            return timed(lambda: http.put(f"/v1/graphs/{digest}", content=body, headers=headers))

    with ThreadPoolExecutor(number) as pool:
        found = list(pool.map(upload, range(number)))
    statuses = Counter(response.status_code for _, response in found)
    text = f"{_counts(statuses)} after {max(taken for taken, _ in found):.1f} s"
    return Outcome(text, _are_refused(statuses))


def endless_header(attacked: Target) -> Outcome:
    """A header without an end, and one with a million lines; without a key."""
    endless = _send_until_closed(attacked, b"X-Endless: ", iter(lambda: b"a" * 65_536, b""))
    lines = _send_until_closed(attacked, b"", (b"X: 1\r\n" * 1000 for _ in range(1000)))
    text = "; ".join(f"{name} after {size:,} bytes" for name, size in (endless, lines))
    return Outcome(text, all(size < 8 << 20 for _, size in (endless, lines)))


def _send_until_closed(attacked: Target, begin: bytes, pieces: Iterator[bytes]) -> tuple[str, int]:
    """The status of the refusal, and the bytes that could be sent, also into buffers."""
    end, size = time.monotonic() + 20.0, 0
    with attacked.connect() as connection:
        try:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + begin)
            while time.monotonic() < end and (piece := next(pieces, b"")):
                connection.sendall(piece)
                size += len(piece)
            connection.sendall(b"\r\n")
            answer = connection.recv(65_536)
        except OSError:
            with suppress(OSError):
                answer = connection.recv(65_536)
                return answer[9:12].decode() or "closed", size
            return "closed", size
        return answer[9:12].decode() or "closed", size


def idle_connections(attacked: Target) -> Outcome:
    """1,100 idle connections; meanwhile another caller connects every half second."""
    with ExitStack() as stack:
        for _ in range(_IDLE):
            stack.enter_context(attacked.connect())
        seconds, failures, end = [], 0, time.monotonic() + _IDLE_SECONDS
        while time.monotonic() < end:
            try:
                with attacked.http(OTHER) as http:
                    taken, response = timed(lambda: http.get("/v1/plans"))
                failures += response.status_code != httpx2.codes.OK
                seconds.append(taken)
            except httpx2.TransportError:
                failures += 1
            time.sleep(0.5)
    text = f"{failures} of {len(seconds)} others refused; at most {max(seconds, default=0):.2f} s"
    return Outcome(text, not failures)


def many_dims(attacked: Target) -> Outcome:
    """Three operators on 64 dims, on a mesh of 2^6, with a time limit of 5 s."""
    body = archives.many_dims()
    digest = hashlib.sha256(body).hexdigest()
    asked = {
        "graph_sha256": digest,
        "mesh": {"shape": [2] * 6},
        "options": {"mode": "inference", "solver": {"time_limit": 5}},
    }
    with attacked.http(ATTACKER) as http:
        http.put(f"/v1/graphs/{digest}", content=body).raise_for_status()
        taken, job = timed(lambda: result_of(http, asked, 90.0))
    reason = job.get("error", {}).get("detail", job.get("result", {}).get("reason", ""))
    status = job.get("result", {}).get("certificate", {}).get("status") or job["state"]
    is_known = job.get("error", {}).get("status", 0) < _SERVER_ERROR
    return Outcome(f"{status} after {taken:.1f} s: {reason}"[:160], bool(job["done"]) and is_known)


def crowd(attacked: Target) -> Outcome:
    """As many jobs of GPT-2 as one caller may have, then a small plan of another."""
    gpt2, small = archives.gpt2(), graph_of(archives.SMALL)
    digests = [hashlib.sha256(body).hexdigest() for body in (gpt2, small)]
    with attacked.http(ATTACKER) as http, attacked.http(OTHER) as other:
        http.put(f"/v1/graphs/{digests[0]}", content=gpt2).raise_for_status()
        other.put(f"/v1/graphs/{digests[1]}", content=small).raise_for_status()
        accepted = 0
        for seed in range(_MOST_JOBS):
            asked = plan_request(digests[0], [2, 4], seed=1000 + seed)
            if http.post("/v1/plans", json=asked).status_code == _TOO_MANY:
                break
            accepted += 1
        asked = plan_request(digests[1], [2, 2], seed=1)
        size, _ = timed(lambda: result_of(other, {**asked, "validate_only": True}, 120.0))
        plan, job = timed(lambda: result_of(other, asked, 120.0))
    text = f"{accepted} jobs accepted; the other's plan after {plan:.1f} s, its size after "
    return Outcome(f"{text}{size:.1f} s", bool(job["done"]) and max(plan, size) < _FAIR)


def large_numbers(attacked: Target) -> Outcome:
    """Dims of 2^62, 10^30 and 10^4000 in graphs and in meshes."""
    found = Counter[str]()
    with attacked.http(ATTACKER) as http:
        for number in (2**62, 10**30, 10**4000):
            body = archives.with_size(graph_of(0), number)
            digest = hashlib.sha256(body).hexdigest()
            put = http.put(f"/v1/graphs/{digest}", content=body)
            found[f"PUT {put.status_code}"] += 1
            if put.status_code < _CLIENT_ERROR:
                job = result_of(http, plan_request(digest, [2, 2]), 60.0)
                found[f"job {job.get('error', {}).get('status', job['state'])}"] += 1
            asked = plan_request("0" * 64, [number, 2])
            looked_up = http.post("/v1/plans:lookup", json=asked)
            found[f"mesh {looked_up.status_code}"] += 1
    text = ", ".join(f"{count}x {name}" for name, count in sorted(found.items()))
    return Outcome(text, not any(name.split()[1].startswith("5") for name in found))


def configs(attacked: Target) -> Outcome:
    """Configs with a million layers, sizes of 10^9, code to load, deep lists; then a good one."""
    good = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256}
    nested: Any = 10**6
    for _ in range(100):
        nested = [nested]
    bad: tuple[dict[str, Any], ...] = (
        *({"n_layer": 10**6}, {"n_embd": 10**9}, {"num_labels": 10**9}, {"vocab_size": -1}),
        *({"auto_map": {"AutoConfig": "a--b.c"}}, {"attn_implementation": "a/b"}),
        *({"layers": nested}, {"layer_types": ["x"] * 90_000, "n_layer": 10**4000}),
    )
    mesh = {"mesh": {"shape": [2]}, "seq_length": 32}
    slow = ({"architectures": ["Trainer"]}, {"activation_function": "no"}, {"n_embd": 63})
    with attacked.http(ATTACKER) as http:
        asked = [{"config": good | fields, **mesh} for fields in bad]
        refused = [timed(partial(http.post, "/v1/plans", json=one)) for one in asked]
        asked = [{"config": good | fields, **mesh} for fields in slow]
        made = [http.post("/v1/plans", json=one) for one in asked]
        last = http.post("/v1/plans", json={"config": good, **mesh})
    statuses = Counter(response.status_code for _, response in refused)
    statuses.update(response.status_code for response in made)
    taken = max(seconds for seconds, _ in refused)
    text = f"{_counts(statuses)}, by arithmetic within {taken:.2f} s; then {last.status_code}"
    return Outcome(text, _are_refused(statuses) and last.status_code < _CLIENT_ERROR)


ATTACKS: tuple[Callable[[Target], Outcome], ...] = (
    many_axes,
    empty_objects,
    large_model,
    endless_header,
    idle_connections,
    many_dims,
    crowd,
    large_numbers,
    configs,
    *FLOODS,
)
"""Attacks, all at the same time."""


def plan_request(digest: str, shape: list[int], *, seed: int = 0) -> dict[str, Any]:
    """The JSON of a request for a plan."""
    return {"graph_sha256": digest, "mesh": {"shape": shape}, "options": {"solver": {"seed": seed}}}


def result_of(http: httpx2.Client, asked: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The job of a request when it is done, or cancelled after a time."""
    body = json.dumps(asked)
    response = http.post("/v1/plans", content=body, headers=_JSON | {"Prefer": "wait=2"})
    if response.status_code != httpx2.codes.ACCEPTED:
        found = response.json()
        is_error = response.status_code >= _CLIENT_ERROR
        return {"done": True, "state": "failed" if is_error else "succeeded"} | (
            {"error": found} if is_error else {"result": found}
        )
    path, end = response.headers["Location"], time.monotonic() + timeout
    while True:
        job: dict[str, Any] = http.get(path).json()
        if job["done"]:
            return job
        if time.monotonic() > end:
            http.post(f"{path}:cancel")
            return {**job, "done": False}
        time.sleep(0.05)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it returns."""
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def _counts(statuses: Counter[int]) -> str:
    return ", ".join(f"{count}x {status}" for status, count in sorted(statuses.items()))


def _are_refused(statuses: Counter[int]) -> bool:
    return all(_CLIENT_ERROR <= status < _SERVER_ERROR for status in statuses)


def raise_open_files() -> None:
    """Let this process open the connections of the attacks."""
    import resource  # noqa: PLC0415  only on Unix

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
