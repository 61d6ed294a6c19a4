"""Tables in a store: solutions equal those of a new solve, and damaged entries are detected."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from autoshard.solve import (
    Edge,
    Problem,
    ProblemNode,
    Repeat,
    Solution,
    SolverSettings,
    solve_problem,
)
from autoshard.solve.block_cache import CachedTable

STRATEGIES = 4
KEY = "0" * 64


@dataclass
class Store:
    """A store that counts what it did not have."""

    entries: dict[str, bytes] = field(default_factory=dict)
    missed: int = 0

    def get(self, key: str) -> bytes | None:
        self.missed += key not in self.entries
        return self.entries.get(key)

    def put(self, key: str, body: bytes) -> None:
        self.entries.setdefault(key, body)


def model(seed: int, *, layers: int, around: int = 0, nudge: float = 0.0) -> Problem:
    """Equal layers in a row with two shared nodes; `seed` makes the layers, `around` the rest."""
    inside, outside = np.random.default_rng(seed), np.random.default_rng(around)

    def node(rng: np.random.Generator, extra: float = 0.0) -> ProblemNode:
        usage = rng.integers(0, 6, STRATEGIES).astype(float)
        return ProblemNode(rng.random(STRATEGIES) + np.array([extra, 0, 0, 0]), usage, (0, 1))

    def edge(rng: np.random.Generator) -> Callable[[int, int], Edge]:
        cost, index = rng.random((STRATEGIES, STRATEGIES)), np.arange(STRATEGIES)
        return lambda source, target: Edge(source, target, cost, index, index)

    members = [node(inside, nudge), node(inside), node(inside)]
    enters, first, second, across = (edge(inside) for _ in range(4))
    spokes = [edge(inside), edge(inside)]
    nodes = [node(outside) for _ in range(2 + around % 2)]
    before = len(nodes)
    nodes.append(node(outside))
    edges = [edge(outside)(0, 1)] + [edge(outside)(i, before) for i in range(before)]
    instances = []
    for _ in range(layers):
        a, b, c = range(len(nodes), len(nodes) + 3)
        nodes += members
        edges += [enters(before, a), first(a, b), second(b, c), across(a, c)]
        edges += [spoke(shared_node, b) for shared_node, spoke in enumerate(spokes)]
        instances.append((a, b, c))
        before = c
    nodes.append(node(outside))
    edges.append(edge(outside)(before, len(nodes) - 1))
    return Problem(tuple(nodes), tuple(edges), repeats=(Repeat(tuple(instances)),))


def limited(problem: Problem, share: float) -> Problem:
    """The problem under a limit part of the way from the least usage to the most."""
    least, most = (sum(float(f(n.usage)) for n in problem.nodes) for f in (np.min, np.max))
    return replace(problem, usage_limit=least + share * (most - least))


def assert_same(one: Solution, other: Solution) -> None:
    assert (one.status, one.objective, one.bound) == (other.status, other.objective, other.bound)
    assert np.array_equal(np.asarray(one.choice), np.asarray(other.choice))


def reused(solution: Solution) -> tuple[int, int]:
    """How many tables came from the store, and how many did not."""
    blocks = solution.blocks
    return sum(b.num_reused for b in blocks), sum(b.num_solved for b in blocks)


RELAXED = SolverSettings(max_group_work=0.0)
"""No table may have axes for shared nodes, so these are relaxed."""

both_ways = pytest.mark.parametrize(
    "settings", [SolverSettings(), RELAXED], ids=["tables over shared nodes", "relaxed first"]
)


@pytest.mark.matrix
@both_ways
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [None, 0.3])
def test_cached_answers_are_those_of_a_fresh_solve(
    seed: int, share: float | None, settings: SolverSettings
) -> None:
    store = Store()
    problem = model(seed, layers=4)
    if share is not None:
        problem = limited(problem, share)
    fresh = solve_problem(problem, settings=settings)
    first = solve_problem(problem, block_cache=store, settings=settings)
    again = solve_problem(problem, block_cache=store, settings=settings)
    assert_same(first, fresh)
    assert_same(again, fresh)
    assert reused(first)[1] > 0
    assert reused(again) == (sum(reused(first)), 0)
    assert fresh.objective == pytest.approx(
        solve_problem(replace(problem, repeats=()), settings=settings).objective
    )


@both_ways
@pytest.mark.parametrize("seed", range(3))
def test_other_depths_and_other_models_reuse_a_block(seed: int, settings: SolverSettings) -> None:
    store = Store()
    first = solve_problem(model(seed, layers=4), block_cache=store, settings=settings)
    for other in (model(seed, layers=7), model(seed, layers=3, around=1)):
        fresh, cached = (
            solve_problem(other, settings=settings),
            solve_problem(other, block_cache=store, settings=settings),
        )
        assert_same(cached, fresh)
        assert reused(cached)[0] > 0
        assert [b.key for b in cached.blocks] == [b.key for b in first.blocks]


@pytest.mark.parametrize("seed", [0, 6, 11])
def test_answers_do_not_depend_on_the_speed_of_the_machine(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = limited(model(seed, layers=6), 0.3)
    fast = solve_problem(problem, relative_gap=0.3, settings=RELAXED)
    now = time.perf_counter
    monkeypatch.setattr("autoshard.solve.state.time.perf_counter", lambda: 1e6 * now())
    assert_same(solve_problem(problem, relative_gap=0.3, settings=RELAXED), fast)


def test_what_repeats_is_named() -> None:
    problem = model(1, layers=5)
    (block,) = solve_problem(problem, block_cache=Store()).blocks
    assert block.num_groups == 5
    assert block.nodes == problem.repeats[0].instances[0]
    (plain,) = solve_problem(problem).blocks
    assert (plain.key, plain.num_reused) == (block.key, 0)


def test_another_price_is_another_block() -> None:
    store = Store()
    solve_problem(model(1, layers=4), block_cache=store)
    other = model(1, layers=4, nudge=1e-12)
    cached = solve_problem(other, block_cache=store)
    assert reused(cached)[0] == 0
    assert_same(cached, solve_problem(other))


def test_a_table_without_its_inside_is_made_again() -> None:
    """The states inside of a group that were asked for are kept apart from its table."""
    store = Store()
    problem = model(2, layers=4)
    fresh = solve_problem(problem, block_cache=store)
    block_cache = {key: body for key, body in store.entries.items() if len(body) != 32 + 3 * 4}
    assert len(block_cache) < len(store.entries)
    without = Store(block_cache)
    cached = solve_problem(problem, block_cache=without)
    assert_same(cached, fresh)
    assert reused(cached) == (sum(reused(fresh)), 0)
    assert without.missed > 0


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda body: body[:-1],
    "cut to the digest": lambda body: body[:32],
    "one bit": lambda body: body[:-2] + bytes([body[-2] ^ 1]) + body[-1:],
    "the digest": lambda body: bytes([body[0] ^ 1]) + body[1:],
    "longer": lambda body: body + bytes(8),
    "of something else": lambda _: b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_entries_are_solved_again(damage: Callable[[bytes], bytes]) -> None:
    store = Store()
    problem = model(3, layers=4)
    fresh = solve_problem(problem, block_cache=store)
    damaged = Store({key: damage(body) for key, body in store.entries.items()})
    cached = solve_problem(problem, block_cache=damaged)
    assert_same(cached, fresh)
    assert reused(cached)[0] == 0


def test_entries_under_each_others_keys_are_not_taken() -> None:
    store = Store()
    problem = model(3, layers=4)
    fresh = solve_problem(problem, block_cache=store)
    keys = list(store.entries)
    mixed = Store({key: store.entries[keys[i - 1]] for i, key in enumerate(keys)})
    cached = solve_problem(problem, block_cache=mixed)
    assert_same(cached, fresh)
    assert reused(cached)[0] == 0


def test_entries_of_another_version_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    problem = model(3, layers=4)
    fresh = solve_problem(problem, block_cache=store)
    monkeypatch.setattr("autoshard.solve.block_cache._FORMAT", b"autoshard table 0")
    cached = solve_problem(problem, block_cache=store)
    assert_same(cached, fresh)
    assert reused(cached)[0] == 0


prices = st.one_of(st.floats(allow_nan=False), st.just(np.inf))


@settings(max_examples=50)
@given(values=arrays(np.float64, array_shapes(max_dims=4, max_side=4), elements=prices))
def test_a_table_comes_back_bit_by_bit(values: np.ndarray) -> None:
    kept = CachedTable(Store(), KEY)
    assert kept.find(values.shape) is None
    kept.keep(values)
    found = kept.find(values.shape)
    assert found is not None
    assert found.tobytes() == values.tobytes()
    assert found.shape == values.shape
    assert kept.find((*values.shape, 2)) is None


def test_a_table_that_is_too_large_is_remembered_as_such() -> None:
    kept = CachedTable(Store(), KEY)
    kept.keep(np.zeros(0))
    found = kept.find((1 << 20, 1 << 20))
    assert found is not None
    assert found.size == 0


def test_a_table_with_something_that_is_no_price_is_not_taken() -> None:
    kept = CachedTable(Store(), KEY)
    kept.keep(np.array([1.0, np.nan]))
    assert kept.find((2,)) is None


@settings(max_examples=50)
@given(strategies=st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_strategies_come_back_if_they_exist(strategies: list[int]) -> None:
    kept = CachedTable(Store(), KEY)
    kept.keep_interior((1, 2), strategies)
    assert kept.find_interior((1, 2), [9] * len(strategies)) == tuple(strategies)
    assert kept.find_interior((2, 1), [9] * len(strategies)) is None
    assert kept.find_interior((1, 2), [9] * (len(strategies) + 1)) is None
    assert kept.find_interior((1, 2), [max(strategies)] * len(strategies)) is None
