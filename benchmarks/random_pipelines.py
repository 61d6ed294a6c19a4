"""Random small models: the pipeline search is compared with brute force.

For each seed a model of a few blocks and a cluster are drawn. The model is exported, and all
partitions of it into stages on all aligned sub-meshes are enumerated and simulated. The search must
find a partition with the least step time, with a bound that is not above it. Run
`python -m benchmarks.random_pipelines --count 200`; the exit status is 1 if any model failed.
"""

import argparse
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.graph import CutPoint, export_model, load_graph
from autoshard.mesh import make_mesh
from autoshard.plan.options import PlanOptions
from autoshard.plan.sub_meshes import is_aligned, sub_mesh_sizes
from autoshard.planner.pipeline.partition import all_partitions
from autoshard.planner.pipeline.policies import stage_cutter
from autoshard.planner.pipeline.search import PipelineSearch
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.simulation import simulate_schedule

_ROUNDING = 1e-9
_MOST_POINTS = 9


class Block(nn.Module):
    """A layer of a random kind."""

    def __init__(self, kind: str, before: int, after: int) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(before)
        self.linear = nn.Linear(before, after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer, with a skip connection where the widths allow one."""
        out: torch.Tensor = self.linear(self.norm(x) if self.kind == "norm" else x)
        out = torch.relu(out)
        return x + out if self.kind == "skip" and x.shape == out.shape else out


@dataclass(frozen=True)
class Compared:
    """Result of one seed.

    Attributes:
        seed: of the model and the cluster.
        partitions: number of partitions.
        simulated: number of partitions that the search simulated.
        failure: the error; empty without one.
    """

    seed: int
    partitions: int
    simulated: int
    failure: str


def model_of(random_: random.Random) -> tuple[nn.Module, torch.Tensor]:
    """A random model and an argument of it."""
    widths = [random_.choice([32, 64, 128, 256]) for _ in range(random_.randint(4, 7))]
    kinds = [random_.choice(["plain", "norm", "skip"]) for _ in widths[1:]]
    pairs = zip(kinds, widths, widths[1:], strict=False)
    blocks = [Block(kind, before, after) for kind, before, after in pairs]
    return nn.Sequential(*blocks), torch.zeros(random_.choice([8, 32, 128]), widths[0])


class FewPoints(PipelineSearch):
    """A search in which stages may begin at a few places only, so that all can be enumerated."""

    @property
    def points(self) -> tuple[CutPoint, ...]:
        """At most eight of the places."""
        every = self.cutter.cut_points
        step = max(1, -(-len(every) // (_MOST_POINTS - 1)))
        return every[::step]


def compare(seed: int) -> Compared:
    """Search pipelines of one random model, and enumerate them."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    model, x = model_of(random_)
    graph = load_graph(export_model(model, (x,)))
    devices = random_.choice([2, 3, 4])
    mesh = make_mesh(
        (devices,),
        intra_bandwidth=10.0 ** random_.uniform(8, 12),
        intra_latency=10.0 ** random_.uniform(-7, -5),
        backend="gloo",
    )
    stages, micro_batches = random_.randint(2, min(3, devices)), random_.randint(3, 6)
    options = PlanOptions(micro_batches=micro_batches)
    search = FewPoints(stage_cutter(graph), mesh, options)
    schedule = Schedule("1F1B", stages, 1, micro_batches)
    found = search.search(stages, schedule="1F1B", stages_per_rank=1, unequal=True)
    sizes = [n for n in sub_mesh_sizes(mesh) if n <= devices - stages + 1]
    best, number = float("inf"), 0
    fits: Callable[[int, int], bool] = lambda offset, n: is_aligned(mesh, offset, n)  # noqa: E731
    for partition in all_partitions(len(search.points) + 2, stages, sizes, devices, fits):
        number += 1
        tables = [search.table(schedule, s, sizes[x.table]) for s, x in enumerate(partition)]
        pairs = zip(tables, partition, strict=True)
        times = [table.times(x.start, x.stop) for table, x in pairs]
        best = min(best, simulate_schedule(schedule, times).seconds)
    failure = ""
    if found is None and best == float("inf"):
        return Compared(seed, 0, 0, "")
    if found is None or abs(found.seconds - best) > _ROUNDING * best:
        failure = f"the search found {found and found.seconds}, brute force {best}"
    elif found.bound > best * (1 + _ROUNDING):
        failure = f"the bound {found.bound} is above {best}"
    return Compared(seed, number, 0 if found is None else found.num_simulated, failure)


def main() -> int:
    """Compare many models."""
    parser = argparse.ArgumentParser(description="Compare the pipeline search with brute force.")
    parser.add_argument("--count", type=int, default=200, help="number of models")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    results = [compare(seed) for seed in range(given.first, given.first + given.count)]
    for result in results:
        if result.failure:
            print(f"seed {result.seed}: {result.failure}")
    failed = sum(bool(result.failure) for result in results)
    print(
        f"{len(results)} models, {sum(r.partitions for r in results):,} partitions, "
        f"{sum(r.simulated for r in results):,} simulated by the search, {failed} failures"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
