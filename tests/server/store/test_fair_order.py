"""The order in which waiting callers get workers."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_server.store.fair_order import FairOrder, QueuedJobs

Name = tuple[str, str | None]


def turns(
    fair: FairOrder, names: list[Name], count: int, running: Mapping[Name, int] | None = None
) -> list[Name]:
    """Who is served, one after the other, while all of them always have queued jobs."""
    queued = [QueuedJobs(*name, i) for i, name in enumerate(names)]
    served: list[Name] = []
    for _ in range(count):
        first = fair.order(queued, running or {})[0]
        fair.served(first.project, first.caller)
        served.append((first.project, first.caller))
    return served


def test_projects_take_turns_and_so_do_the_callers_of_one() -> None:
    names: list[Name] = [("a", "x"), ("a", "y"), ("b", None)]
    served = turns(FairOrder(), names, 6)
    assert served == [*names[::2], names[1], names[2], names[0], names[2]]


def test_a_project_of_twice_the_weight_gets_two_of_three_turns() -> None:
    served = turns(FairOrder({"a": 2.0}), [("a", None), ("b", None)], 300)
    assert Counter(served) == {("a", None): 200, ("b", None): 100}
    assert all(("b", None) in served[i : i + 3] for i in range(298))


def test_who_has_fewer_running_jobs_is_first() -> None:
    names: list[Name] = [("a", "x"), ("a", "y"), ("b", "z")]
    running = {("a", "x"): 1, ("b", "z"): 2}
    assert turns(FairOrder(), names, 2, running) == [("a", "y")] * 2
    # 4 running jobs at weight 3 are less than 2 at weight 1.
    running = {("a", "x"): 1, ("a", "y"): 3, ("b", "z"): 2}
    assert turns(FairOrder({"a": 3.0}), names, 1, running) == [("a", "x")]


def test_a_pause_saves_up_no_turns() -> None:
    fair = FairOrder()
    turns(fair, [("b", None)], 3)
    turns(fair, [("a", None)], 50)
    served = turns(fair, [("a", None), ("b", None)], 10)
    assert Counter(served) == {("a", None): 5, ("b", None): 5}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    before=st.lists(st.integers(0, 4), max_size=20),
)
def test_over_any_history_turns_follow_the_weights(weights: list[int], before: list[int]) -> None:
    fair = FairOrder({str(i): float(weight) for i, weight in enumerate(weights)})
    for index in before:
        turns(fair, [(str(index % len(weights)), None)], 1)
    served = Counter(turns(fair, [(str(i), None) for i in range(len(weights))], 20 * sum(weights)))
    for i, weight in enumerate(weights):
        # One turn early or late, and what the history owes.
        assert served[str(i), None] == pytest.approx(20 * weight, abs=2 + weight)
