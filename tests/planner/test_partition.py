"""The dynamic program for pipeline stages against brute force over all partitions."""

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from autoshard.planner.pipeline.partition import (
    Partition,
    PartitionProblem,
    RangeTable,
    all_partitions,
)


class Costs:
    """Random seconds of each range on sub-meshes of 1, 2 and 4 devices."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.sizes = (1, 2, 4)
        self.num_points = int(rng.integers(3, 8))
        self.micro_batches = int(rng.integers(1, 9))
        self.num_devices = int(rng.choice([2, 3, 4, 6, 8]))
        layers = rng.uniform(0.2, 2.0, self.num_points - 1)
        scale = {n: rng.uniform(0.9, 1.4) / n for n in self.sizes}
        self.forward, self.backward, self.end = {}, {}, {}
        for n in self.sizes:
            shape = (self.num_points, self.num_points)
            self.forward[n] = np.full(shape, np.inf)
            self.backward[n] = np.full(shape, np.inf)
            self.end[n] = rng.uniform(0, 0.3, shape)
            for i in range(self.num_points):
                for j in range(i + 1, self.num_points):
                    seconds = layers[i:j].sum() * scale[n] * rng.uniform(0.9, 1.1)
                    share = rng.uniform(0.25, 0.4)
                    # Some ranges do not fit into memory.
                    if rng.random() < 0.9:
                        self.forward[n][i, j] = share * seconds
                        self.backward[n][i, j] = (1 - share) * seconds

    def tables(self) -> list[RangeTable]:
        return [
            RangeTable(
                n,
                self.forward[n] + self.backward[n],
                self.micro_batches * (self.forward[n] + self.backward[n]),
                self.end[n],
            )
            for n in self.sizes
        ]

    def simulate(self, partition: Partition) -> float:
        """Step time of GPipe: all forwards, then all backwards, without transfers."""
        sizes = [self.sizes[stage.table] for stage in partition]
        where = [(n, (s.start, s.stop)) for n, s in zip(sizes, partition, strict=True)]
        forward = [self.forward[n][at] for n, at in where]
        backward = [self.backward[n][at] for n, at in where]
        end = [self.end[n][at] for n, at in where]
        free = [0.0] * len(partition)
        ready = 0.0
        for _ in range(self.micro_batches):
            ready = 0.0
            for stage, seconds in enumerate(forward):
                ready = free[stage] = max(ready, free[stage]) + seconds
        for _ in range(self.micro_batches):
            ready = 0.0
            for stage in reversed(range(len(partition))):
                ready = free[stage] = max(ready, free[stage]) + backward[stage]
        return max(a + b for a, b in zip(free, end, strict=True))


def is_aligned(offset: int, devices: int) -> bool:
    return offset % devices == 0


def anywhere(_offset: int, _devices: int) -> bool:
    return True


@pytest.mark.parametrize("seed", range(200))
def test_the_best_partition_is_that_of_brute_force(seed: int) -> None:
    costs = Costs(seed)
    fits: Callable[[int, int], bool] = (is_aligned, anywhere)[seed % 2]
    num_stages = random.Random(seed).randint(1, min(4, costs.num_points - 1))
    problem = PartitionProblem([costs.tables()] * num_stages, costs.num_devices, fits)
    every = list(all_partitions(costs.num_points, num_stages, costs.sizes, costs.num_devices, fits))
    expected = min(map(costs.simulate, every), default=float("inf"))
    found = problem.best(costs.simulate)
    if found is None:
        assert expected == float("inf")
        return
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    assert found.bound == found.seconds
    assert problem.bound <= expected * (1 + 1e-12)
    assert found.num_simulated <= len(every)
    check_covers(found.partition, costs)


def check_covers(partition: Partition, costs: Costs) -> None:
    assert partition[0].start == 0
    assert partition[-1].stop == costs.num_points - 1
    offset = 0
    for one, following in pairwise((*partition, None)):
        assert one is not None
        assert one.offset == offset
        offset += costs.sizes[one.table]
        assert following is None or following.start == one.stop
    assert offset == costs.num_devices


def test_a_search_that_stops_early_has_a_valid_bound() -> None:
    costs = Costs(5)
    problem = PartitionProblem([costs.tables()] * 2, costs.num_devices)
    exact, early = problem.best(costs.simulate), problem.best(costs.simulate, max_simulations=1)
    assert exact is not None
    assert early is not None
    assert early.num_simulated == 1
    assert early.bound <= exact.seconds <= early.seconds


def test_a_pipeline_in_which_nothing_fits_has_no_partition() -> None:
    full = np.full((3, 3), np.inf)
    table = RangeTable(1, full, full, full)
    problem = PartitionProblem([[table]] * 2, 2)
    assert problem.bound == float("inf")
    assert problem.best(lambda _: 0.0) is None
