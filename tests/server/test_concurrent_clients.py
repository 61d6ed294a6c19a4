"""Concurrent clients with equal requests."""

import asyncio
import hashlib
from collections import Counter
from typing import Any

import httpx2
import pytest

from autoshard.checker import check_plan
from autoshard.graph import load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import plan_id
from autoshard_server.solvers.executor import ThreadExecutor
from autoshard_server.solvers.solving import solve

CLIENTS = 200
DIFFERENT = 20


@pytest.mark.thorough
def test_two_hundred_clients_with_twenty_requests(start_service: Any, make_graph: Any) -> None:
    graph = make_graph(88)
    digest = hashlib.sha256(graph).hexdigest()
    solves: Counter[str] = Counter()

    def count(work: Any, on_progress: Any, cancel: Any) -> Any:
        solves[work.request] += 1
        return solve(work, on_progress, cancel)

    service = start_service(executor=ThreadExecutor(count), num_workers=2)
    service.http.put(f"/v1/graphs/{digest}", content=graph).raise_for_status()

    async def ask(http: httpx2.AsyncClient, seed: int) -> httpx2.Response:
        options = {"solver": {"seed": seed}}
        body = {"graph_sha256": digest, "mesh": {"shape": [4]}, "options": options}
        return await http.post("/v1/plans", json=body, headers={"Prefer": "wait=60"})

    async def everybody() -> list[httpx2.Response]:
        # A connection for each, all open at once.
        limits = httpx2.Limits(max_connections=CLIENTS)
        async with httpx2.AsyncClient(base_url=service.url, timeout=300, limits=limits) as http:
            asked = (ask(http, number % DIFFERENT) for number in range(CLIENTS))
            return await asyncio.gather(*asked)

    answers = asyncio.run(everybody())
    assert Counter(answer.status_code for answer in answers) == {200: CLIENTS}
    assert len(solves) == solves.total() == DIFFERENT
    program, mesh = load_graph(graph), make_mesh((4,))
    for number in range(DIFFERENT):
        same = {answer.content for answer in answers[number::DIFFERENT]}
        (content,) = same
        plan = Plan.from_json(content)
        assert plan.id == plan_id(program, mesh, PlanOptions(seed=number))
        assert check_plan(plan, program) == ()
