"""Shares of groups in a budget, and deletions in batches."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard_solver_cache import SolverCache, in_batches
from autoshard_solver_cache.budgets import group_limits


def test_the_largest_groups_give_up_entries_and_small_ones_keep_theirs() -> None:
    assert group_limits({"a": 10, "b": 20}, 30) == {}
    assert group_limits({"a": 10, "b": 90}, 50) == {"b": 40}
    assert group_limits({"a": 10, "b": 90, "c": 70}, 90) == {"b": 40, "c": 40}
    assert group_limits({"a": 10, "b": 90}, None, 60) == {"b": 60}
    assert group_limits({"a": 10, "b": 90, "c": 70}, 200, 60) == {"b": 60, "c": 60}
    assert group_limits({"a": 10, "b": 90, "c": 70}, 100, 60) == {"b": 45, "c": 45}
    assert group_limits({"": 90}, 50) == {"": 50}


@pytest.mark.thorough
@given(
    sizes=st.dictionaries(st.text(max_size=2), st.integers(0, 1000), max_size=8),
    most=st.none() | st.integers(0, 2000),
    group_most=st.none() | st.integers(0, 900),
)
def test_limits_meet_both_budgets_and_are_fair(
    sizes: dict[str, int], most: int | None, group_most: int | None
) -> None:
    limits = group_limits(sizes, most, group_most)
    kept = sizes | limits
    assert all(0 <= kept[group] <= size for group, size in sizes.items())
    assert most is None or sum(kept.values()) <= most
    assert group_most is None or all(size <= group_most for size in kept.values())
    # Whoever has lost something keeps as much as any other, apart from a remainder.
    largest = max(kept.values(), default=0)
    fair = [limit >= largest - 1 or limit == group_most for limit in limits.values()]
    assert all(fair)


def test_batches_end_when_nothing_is_left_or_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    left, sizes = 5000, []

    def step(limit: int) -> int:
        nonlocal left
        sizes.append(limit)
        done = min(limit, left)
        left -= done
        return done

    assert in_batches(step, is_over=lambda: len(sizes) == 3) == sum(sizes)
    assert in_batches(step) + sum(sizes[:3]) == 5000
    assert (left, sizes[:3]) == (0, [50, 75, 112])


def test_slow_batches_get_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sizes = 0.0, []

    def step(limit: int) -> int:
        nonlocal clock
        clock += 0.0007 * limit
        sizes.append(limit)
        return limit if len(sizes) < 9 else 0

    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    in_batches(step)
    assert sizes == [50, *[20] * 8]


def test_eviction_takes_from_whoever_has_most() -> None:
    cache = SolverCache("sqlite://", max_bytes=6000, group_of=lambda name: name.partition("-")[0])
    for namespace in ("ann-plans", "ann-graphs"):
        cache.put(namespace, "small", bytes(range(200)))
    for i in range(12):
        body = b"".join(((i * 7919 + j * j) % 65521).to_bytes(2, "big") for j in range(500))
        cache.put(("bob-plans", "bob-graphs")[i % 2], str(i), body)
    assert cache.usage()["ann-plans"].num_entries == cache.usage()["ann-graphs"].num_entries == 1
    assert sum(used.nbytes for used in cache.usage().values()) <= 6000
    kept = [int(e.key) for n in ("bob-plans", "bob-graphs") for e in cache.entries(n)]
    assert sorted(kept) == list(range(12 - len(kept), 12))
    assert kept
    cache.close()
