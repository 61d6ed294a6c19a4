"""Overlapped seconds, computed by hand and by step-by-step schedules."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn

from autoshard.costs import ForwardBackward, Overlap, overlapped_seconds
from autoshard.graph import Graph

NUMBERS = st.floats(0, 1e3)


@pytest.mark.parametrize(
    ("communication", "compute", "again", "hidden"),
    [
        ((3, 5), (2, 10), False, 2 + 5),
        ((3, 5), (2, 10), True, 2 + 8),
        ((3, 5), (2, 6), True, 2 + 6),
        ((3, 5), (9, 4), False, 3 + 4),
        ((3, 5), (0, 0), True, 0),
        ((0, 0), (9, 9), True, 0),
    ],
)
def test_what_fits_is_hidden(
    communication: tuple[float, float],
    compute: tuple[float, float],
    again: bool,
    hidden: float,
) -> None:
    found = overlapped_seconds(
        ForwardBackward(*communication), ForwardBackward(*compute), again=again
    )
    assert found == pytest.approx(hidden, rel=2e-6)
    assert found <= hidden


def test_what_overlaps_slows_compute_down() -> None:
    communication, compute = ForwardBackward(3.0, 5.0), ForwardBackward(2.0, 10.0)
    found = overlapped_seconds(communication, compute, contention=0.25)
    assert found == pytest.approx(0.75 * (2 + 5), rel=2e-6)


def test_arrays_are_hidden_place_by_place() -> None:
    communication = ForwardBackward(
        np.array([[3.0, 3.0], [1.0, np.inf]]), np.array([[5.0, 5.0], [1.0, 0]])
    )
    compute = ForwardBackward(np.array([2.0, 4.0]), np.array([10.0, 1.0]))
    found = overlapped_seconds(communication, compute)
    assert found == pytest.approx(np.array([[7.0, 4.0], [2.0, 4.0]]), rel=2e-6)


def makespan(communication: list[float], compute: list[float]) -> float:
    """When the last reader is done, if each waits for what it reads and for the one before."""
    done = 0.0
    for arrives, takes in zip(accumulate(communication), compute, strict=True):
        done = max(done, arrives) + takes
    return done


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_the_price_is_short_of_a_schedule_by_one_reader_at_most(
    readers: list[tuple[float, float]],
) -> None:
    price = sum(
        c + w - overlapped_seconds(ForwardBackward(c, 0.0), ForwardBackward(w, 0.0))
        for c, w in readers
    )
    truth = makespan([c for c, _ in readers], [w for _, w in readers])
    assert truth <= price + max(min(c, w) for c, w in readers) + 1e-9


class Readers(nn.Module):
    """Readers with a weight and a bias, with a view of a weight, with one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.turned = nn.Parameter(torch.zeros(64, 64))
        self.twice = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) @ self.turned.t()
        return (y + self.twice * self.twice).sum()


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return graph_of((Readers(), {"x": torch.zeros(8, 64)}))


def shares(graph: Graph, operator: str) -> list[float | None]:
    overlap = Overlap(graph, slow_devices(latency=1e-6, a=2, b=2))
    (node,) = [n for n in graph.nodes if n.operator == operator]
    return [overlap.share(node, position) for position in range(len(node.inputs))]


def test_weights_of_a_reader_share_its_compute_by_their_reductions(graph: Graph) -> None:
    x, weight, bias = shares(graph, "aten.linear.default")
    # A reduction over two ranks is two steps of 1e-6 s, and moves each byte once at 1e9 / s.
    reduced = [2e-6 + nbytes / 1e9 for nbytes in (64 * 64 * 4, 64 * 4)]
    assert x is None
    assert [weight, bias] == pytest.approx([part / sum(reduced) for part in reduced])


def test_views_of_weights_are_weights_and_activations_are_none(graph: Graph) -> None:
    assert shares(graph, "aten.t.default") == [1.0]
    assert shares(graph, "aten.matmul.default") == [None, 1.0]
    assert shares(graph, "aten.mul.Tensor") == [0.5, 0.5]
    assert shares(graph, "aten.add.Tensor") == [None, None]


def test_on_one_device_nothing_has_a_share(graph: Graph) -> None:
    overlap = Overlap(graph, slow_devices(a=1))
    assert all(
        overlap.share(node, position) is None
        for node in graph.nodes
        for position in range(len(node.inputs))
    )
