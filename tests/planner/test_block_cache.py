"""Block caches with real models: plans equal those of a new solve."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.models import graph_of, llama, meta, residuals

from autoshard.graph import Graph, export_model
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.solve import KeyValueStore
from autoshard_solver_cache import Cache, FolderCache, NamespacedCache, SolverCache

MESH = (2, 2)


@pytest.fixture(scope="module")
def llamas() -> dict[int, Graph]:
    """A small Llama by its number of layers."""
    return {n: graph_of(meta(llama, layers=n, batch=16, sequence=16)) for n in (4, 7)}


@pytest.fixture(params=["sqlite", "folder"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    opened: Cache = FolderCache(tmp_path / "solved")
    if request.param == "sqlite":
        opened = SolverCache(f"sqlite:///{tmp_path / 'store.sqlite3'}")
    with closing(opened) as opened:
        yield opened


def planned(graph: Graph, block_cache: KeyValueStore | None = None, **options: Any) -> Plan:
    return make_plan(graph, make_mesh(MESH), PlanOptions(**options), block_cache=block_cache)


def content(plan: Plan) -> str:
    """The plan without what made it."""
    return plan.model_dump_json(exclude={"provenance"})


def counts(plan: Plan) -> tuple[int, int]:
    blocks = plan.provenance.blocks
    return sum(b.num_reused for b in blocks), sum(b.num_solved for b in blocks)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_deeper_model_reuses_the_block(cache: Cache, llamas: dict[int, Graph], mode: str) -> None:
    block_cache = NamespacedCache(cache, "blocks")
    shallow = planned(llamas[4], block_cache, mode=mode)
    deep = planned(llamas[7], block_cache, mode=mode)
    assert content(shallow) == content(planned(llamas[4], mode=mode))
    assert content(deep) == content(planned(llamas[7], mode=mode))
    assert counts(deep)[0] > 0
    assert {b.key for b in deep.provenance.blocks} == {b.key for b in shallow.provenance.blocks}
    assert [b.num_repetitions for b in shallow.provenance.blocks] < [
        b.num_repetitions for b in deep.provenance.blocks
    ]
    names = {node.name for node in deep.stages[0].nodes}
    assert all(block.first in names for block in deep.provenance.blocks)
    assert cache.stats("blocks").hits >= counts(deep)[0]


def test_a_plan_without_a_cache_says_what_repeats(llamas: dict[int, Graph]) -> None:
    plan = planned(llamas[4])
    assert plan.provenance.blocks
    assert counts(plan)[0] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("cache", ["folder"], indirect=True)
def test_a_binding_budget_gives_the_plan_of_a_fresh_solve(
    cache: Cache, llamas: dict[int, Graph]
) -> None:
    block_cache = NamespacedCache(cache, "blocks")
    free = planned(llamas[4], block_cache)
    assert free.memory is not None
    options = {"memory_budget": int(free.memory.peak * 0.9), "relative_gap": 0.02}
    fresh = planned(llamas[4], **options)
    first = planned(llamas[4], block_cache, **options)
    again = planned(llamas[4], block_cache, **options)
    assert fresh.memory is not None
    assert fresh.memory.peak <= options["memory_budget"]
    assert content(first) == content(again) == content(fresh)
    assert counts(first)[1] > 0
    assert counts(again) == (sum(counts(first)), 0)


def spoil_file(folder: Path, damage: Callable[[bytes], bytes]) -> int:
    files = [path for path in folder.rglob("*") if path.is_file()]
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    return len(files)


def spoil_rows(path: Path, damage: Callable[[bytes], bytes]) -> int:
    with closing(sqlite3.connect(path)) as connection, connection:
        rows = connection.execute("SELECT rowid, body FROM cache_entries").fetchall()
        for row, body in rows:
            connection.execute(
                "UPDATE cache_entries SET body = ? WHERE rowid = ?", (damage(body), row)
            )
    return len(rows)


@pytest.mark.matrix
@pytest.mark.parametrize("damage", [lambda body: body[:-7], lambda body: b"junk" + body[4:]])
@pytest.mark.parametrize("kind", ["sqlite", "folder"])
def test_spoilt_entries_are_dropped_and_solved_again(
    kind: str, tmp_path: Path, llamas: dict[int, Graph], damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "store"
    make: Callable[[], Cache] = partial(FolderCache, path)
    if kind == "sqlite":
        make = partial(SolverCache, f"sqlite:///{path}")
    with closing(make()) as cache:
        first = planned(llamas[4], NamespacedCache(cache, "blocks"))
    spoilt = spoil_rows(path, damage) if kind == "sqlite" else spoil_file(path, damage)
    assert spoilt > 0
    with closing(make()) as cache:
        block_cache = NamespacedCache(cache, "blocks")
        second = planned(llamas[4], block_cache)
        assert content(second) == content(first)
        assert counts(second)[0] == 0
        assert cache.stats("blocks").corrupted > 0
        assert counts(planned(llamas[4], block_cache))[1] == 0


PLANNER = """
import sys
from pathlib import Path
from autoshard.graph import load_graph
from autoshard.mesh import make_mesh
from autoshard.planner import (make_plan)
from autoshard_solver_cache import FolderCache, NamespacedCache, SolverCache
kind, store, archive = sys.argv[1:]
cache = {"sqlite": SolverCache, "folder": FolderCache}[kind](store)
block_cache = NamespacedCache(cache, "blocks")
plan = make_plan(load_graph(Path(archive)), make_mesh((2, 4)), block_cache=block_cache)
print(plan.to_json())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sqlite", "folder"])
def test_processes_share_blocks(kind: str, tmp_path: Path) -> None:
    """Two at once, then one that solves nothing: entries are the same in every process."""
    archive = tmp_path / "residuals.pt2"
    model, kwargs = meta(residuals, layers=4)
    archive.write_bytes(export_model(model, (), kwargs))
    store = str(tmp_path / "store") if kind == "folder" else f"sqlite:///{tmp_path / 'store'}"
    command = [sys.executable, "-c", PLANNER, kind, store, str(archive)]
    plans = []
    for num_processes in (2, 1):
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own code
            for _ in range(num_processes)
        ]
        plans += [json.loads(process.communicate()[0]) for process in processes]
        assert [process.returncode for process in processes] == [0] * num_processes
    last = plans[-1]["provenance"]["blocks"]
    assert [block["num_solved"] for block in last] == [0] * len(last)
    assert len({json.dumps({**plan, "provenance": None}) for plan in plans}) == 1
