r"""What a collective costs: seconds as straight lines over the bytes.

Let an axis have n ranks, of which r_l share a group at link level l (innermost l = 0, and
r_{-1} = 1), in g_l groups (g_{-1} = n). B is the size of the larger of a rank's tensor
before and after, bw_l a device's bandwidth and lat_l the latency of a step at level l.

All-gather and reduce-scatter take the faster of two algorithms, as NCCL does:

* ring: n - 1 steps, of which g_{l-1} - g_l cross level l; every one of the r_{l-1} ranks
  of a group carries its own share of the ring over its own link, all levels at once:
  sum_l (g_{l-1} - g_l) lat_l + max_l (n-1)/n B / (r_{l-1} bw_l);
* stages, for short messages: recursive doubling level by level, outermost first, so that
  each byte enters a group once:
  sum_l [ceil(log2(g_{l-1} / g_l)) lat_l + (1/r_{l-1} - 1/r_l) B / bw_l]. Long messages run
  as rings, so the term in B is never taken below the ring's.

All-reduce is a reduce-scatter and an all-gather: both twice. All-to-all exchanges B/n with
each peer in turn; what leaves a group goes over the sender's own link, all levels at once:
sum_l (r_l - r_{l-1}) lat_l + max_l (1 - r_{l-1}/n) B / bw_l. A halo exchange sends B to the two
ranks next to a rank, both at once, as if over the slowest link that any of them crosses, however
many ranks there are: max_l lat_l + max_l B / bw_l. Every collective also pays the topology's
overhead once, which is the floor for small messages. A link may have figures of its own
for a collective, where one was measured that the common ones do not describe; and it may be
slower for the bytes of a message beyond some size, which is then the case of the whole price.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), for the volumes and the steps of ring, recursive doubling and
pairwise exchange; nccl-tests, doc/PERFORMANCE.md, for bus bandwidth; NCCL,
src/graph/tuning.cc, for the split of a ring's steps between the links inside and between
nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from typing import ClassVar, NamedTuple

from pydantic import ConfigDict

from autoshard.errors import MeshError
from autoshard.mesh.checks import check_not_negative
from autoshard.mesh.topology import INNER, Link, Rate, check_collective


class Line(NamedTuple):
    """Seconds as `fixed + slope * nbytes`, with more slope beyond some bytes.

    Attributes:
        fixed: seconds without any bytes.
        slope: seconds per byte.
        bends: pairs of bytes, and how much the slope grows there, as a share of `slope`.
    """

    fixed: float
    slope: float
    bends: tuple[tuple[int, float], ...] = ()

    def seconds(self, nbytes: int) -> float:
        """Seconds for so many bytes."""
        counted: float = nbytes
        for start, growth in self.bends:
            counted += growth * max(nbytes - start, 0)
        return self.fixed + self.slope * counted


@dataclass(frozen=True, slots=True)
class Span:
    """How an axis lies over the groups of one link level.

    Attributes:
        num_groups: groups that the ranks of the axis fall into.
        ranks_per_group: how many of them share a group; the fewest where groups differ.
    """

    num_groups: int
    ranks_per_group: int


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """The cost model of Alpa: one latency and one inverse bandwidth per axis.

    An alternative to prices from links, for comparison with published results. Units are
    whatever alpha and beta are in; local copies are then free. The formulas, with their
    constants, are those of alpa/shard_parallel/auto_sharding.py (`LogicalDeviceMesh`).

    Attributes:
        alpha: price of a collective, per axis.
        beta: price of a byte, per axis.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.alpha) != len(self.beta):
            raise MeshError(
                f"alpha has {len(self.alpha)} entries and beta {len(self.beta)}; "
                "give one of each per axis"
            )
        for name, values in (("alpha", self.alpha), ("beta", self.beta)):
            for axis, value in enumerate(values):
                check_not_negative(value, f"{name}[{axis}]")

    def line(self, action: str, axis: int, num_ranks: int) -> Line:
        """Price of a collective over one axis of more than one rank.

        The published all-to-all counts the whole group's bytes, (n-1)/n^2 of them, with a
        penalty of n/2; a rank's tensor is one n-th of that. Alpa has no halo exchange: it is
        taken as a message of these bytes.
        """
        check_collective(action)
        n = num_ranks
        constant, volume = {
            "all_reduce": (0.01, 2 * (n - 1) / n),
            "all_gather": (0.1, (n - 1) / n),
            "reduce_scatter": (0.001, (n - 1) / n),
            "all_to_all": (0.001, (n - 1) / 2),
            "halo_exchange": (0.001, 1.0),
        }[action]
        return Line(self.alpha[axis] + constant, self.beta[axis] * volume)


def lines(action: str, num_ranks: int, spans: Sequence[Span], links: Sequence[Link]) -> list[Line]:
    """Price of a collective by each algorithm; the lowest line at a size is what it takes.

    Args:
        action: name of the collective, by which links have figures (`MEASURABLE`).
        num_ranks: ranks that take part; more than one.
        spans: how they lie over each link level, innermost first.
        links: the levels.
    """
    check_collective(action.removesuffix(INNER))
    crossings = list(_crossings(action, num_ranks, spans, links))
    if action == "all_to_all":
        return [_exchange(num_ranks, crossings)]
    if action == "halo_exchange":
        return [_neighbours(crossings)]
    passes = 2 if action == "all_reduce" else 1
    ring, stages = _ring(num_ranks, crossings), _stages(crossings)
    stages = stages._replace(slope=max(ring.slope, stages.slope))
    return [Line(passes * x.fixed, passes * x.slope, ring.bends) for x in (ring, stages)]


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A link level that an axis crosses: r_{l-1}, r_l, g_{l-1}, g_l, bw_l and lat_l."""

    ranks_inside: int
    ranks: int
    groups_inside: int
    groups: int
    link: Rate


def _crossings(
    action: str, num_ranks: int, spans: Sequence[Span], links: Sequence[Link]
) -> Iterable[_Crossing]:
    chain = [Span(num_ranks, 1), *spans]
    for (inside, span), link in zip(pairwise(chain), links, strict=True):
        if span.num_groups < inside.num_groups:
            yield _Crossing(
                ranks_inside=inside.ranks_per_group,
                ranks=span.ranks_per_group,
                groups_inside=inside.num_groups,
                groups=span.num_groups,
                link=link.rate(action),
            )


def _ring(num_ranks: int, crossings: Sequence[_Crossing]) -> Line:
    volume = (num_ranks - 1) / num_ranks
    slopes = [volume / (c.ranks_inside * c.link.bandwidth) for c in crossings]
    return Line(
        sum((c.groups_inside - c.groups) * c.link.latency for c in crossings),
        max(slopes),
        _bends(slopes, crossings),
    )


def _stages(crossings: Sequence[_Crossing]) -> Line:
    return Line(
        sum(ceil(log2(c.groups_inside / c.groups)) * c.link.latency for c in crossings),
        sum((1 / c.ranks_inside - 1 / c.ranks) / c.link.bandwidth for c in crossings),
    )


def _exchange(num_ranks: int, crossings: Sequence[_Crossing]) -> Line:
    slopes = [(1 - c.ranks_inside / num_ranks) / c.link.bandwidth for c in crossings]
    return Line(
        sum((c.ranks - c.ranks_inside) * c.link.latency for c in crossings),
        max(slopes),
        _bends(slopes, crossings),
    )


def _neighbours(crossings: Sequence[_Crossing]) -> Line:
    slopes = [1 / c.link.bandwidth for c in crossings]
    return Line(max(c.link.latency for c in crossings), max(slopes), _bends(slopes, crossings))


def _bends(
    slopes: Sequence[float], crossings: Sequence[_Crossing]
) -> tuple[tuple[int, float], ...]:
    """The bends of the link that long messages wait for."""
    rate = crossings[slopes.index(max(slopes))].link
    inverses = [1.0, *(rate.bandwidth / bend.bandwidth for bend in rate.bends)]
    growths = (after - before for before, after in pairwise(inverses))
    return tuple((bend.nbytes, growth) for bend, growth in zip(rate.bends, growths, strict=True))
