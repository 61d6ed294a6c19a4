"""The cost model of collectives over nested levels of links.

A collective costs `fixed + slope * bytes` seconds, with the fastest of several algorithms. Let an
axis have n ranks, of which r_l share a group at link level l (innermost l = 0, and r_{-1} = 1), in
g_l groups (g_{-1} = n). B is the size of the larger of a rank's tensor before and after, bw_l a
device's bandwidth and lat_l the latency of a step at level l. All groups of an axis communicate at
the same time, so bw_l is what a device has when all devices of its node communicate: its share of
the node's adapters. r_{l-1} ranks of a group use r_{l-1} times as much.

**NCCL** has an algorithm with a protocol where all crossed levels have a rate for it (`ALGORITHMS`;
LL and LL128 send flags with the data, for less latency and less bandwidth than Simple). Its
overhead is that of the outermost crossed level.

* ring (all-gather, reduce-scatter; twice for all-reduce): n - 1 steps, of which g_{l-1} - g_l cross
  level l; each of the r_{l-1} ranks of a group transfers its share of the ring over its own link,
  on all levels at the same time:
  overhead + sum_l (g_{l-1} - g_l) lat_l + max_l (n-1)/n B / (r_{l-1} bw_l);
* tree (all-reduce): double binary trees between groups of the outer levels, chains in the
  innermost. Up and down: overhead + 2 [(r_0 - 1) lat_0 + sum_{l>0} log2(g_{l-1} / g_l) lat_l] +
  max_l v_l B / (r_{l-1} bw_l). Each link carries v_l = 2 (sums up, results down), but only 1
  between two groups, where each is the root of one tree;
* NVLS (all-reduce): the switch of the innermost level sums and multicasts, with trees between
  groups: overhead + lat_0 + 2 sum_{l>0} log2(g_{l-1} / g_l) lat_l, and per byte the maximum of
  (1 + 1/r_0) / bw_0, since each rank sends its tensor and one share of results, and of v_l as for
  trees. It needs more than two ranks in the innermost group. All-gather and reduce-scatter have
  it within one such group, where a rank's link carries B: overhead + lat_0 + B / bw_0;
* all-to-all: B/n to and from each peer; the peers in one group are served at once:
  overhead + sum_l (g_{l-1} / g_l - 1) lat_l + max_l (1 - r_{l-1}/n) B / bw_l;
* halo exchange: B to the two neighbouring ranks at the same time, priced with the slowest link that
  any of them crosses: overhead + max_l lat_l + max_l B / bw_l.

All-gather and reduce-scatter have no algorithm with a logarithmic number of steps over nodes, but
PAT, of NCCL 2.23 and later for one rank a node. PAT and CollNet (switches that sum between nodes)
are not modelled.

**Measured rates and gloo**: one rate per level and collective. All-gather and reduce-scatter take
the faster of the ring above and, for short messages, recursive doubling level by level, outermost
first, so that each byte enters a group once:
sum_l [ceil(log2(g_{l-1} / g_l)) lat_l + (1/r_{l-1} - 1/r_l) B / bw_l]. Long messages run as rings,
so the term in B is never taken below the ring's. All-reduce is both, twice. All-to-all exchanges
with each peer in turn: sum_l (r_l - r_{l-1}) lat_l instead. A rate may have a lower bandwidth for
the bytes of a message beyond some size.

Every collective also has the topology's fixed overhead.

Sources: NCCL, src/graph/tuning.cc (ncclTopoTuneModel), for algorithms, protocols, steps and
volumes; nccl-tests, doc/PERFORMANCE.md, for bus bandwidth, which is the bw_l of a ring; Sanders,
Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009);
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), for recursive doubling and pairwise exchange.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from types import MappingProxyType
from typing import NamedTuple

from autoshard.mesh.topology import INNER, PROTOCOLS, Link, Rate, check_collective


class Line(NamedTuple):
    """Seconds as a function of bytes: `fixed + slope * nbytes`, with a larger slope after bends.

    Attributes:
        fixed: seconds for 0 bytes.
        slope: seconds per byte.
        bends: (bytes, increase of the slope from there, relative to `slope`).
    """

    fixed: float
    slope: float
    bends: tuple[tuple[int, float], ...] = ()

    def seconds(self, nbytes: int) -> float:
        """Seconds for a number of bytes."""
        if not self.bends:
            return self.fixed + self.slope * nbytes
        counted: float = nbytes
        for start, growth in self.bends:
            counted += growth * max(nbytes - start, 0)
        return self.fixed + self.slope * counted


@dataclass(frozen=True, slots=True)
class Span:
    """Distribution of the ranks of an axis over the groups of one link level.

    Attributes:
        num_groups: number of groups that have ranks of the axis.
        ranks_per_group: number of ranks of the axis in a group; the minimum if groups differ.
    """

    num_groups: int
    ranks_per_group: int


def lines(
    action: str,
    num_ranks: int,
    spans: Sequence[Span],
    links: Sequence[Link],
    backend: str,
) -> list[Line]:
    """Price of a collective with each algorithm; the minimum at a size is its price.

    Args:
        action: name of the collective (`MEASURABLE`).
        num_ranks: number of ranks; more than one.
        spans: distribution of the ranks over each link level, innermost first.
        links: the levels.
        backend: the backend whose algorithms are priced where no link that is crossed has a
            measured rate of the collective.
    """
    collective = action.removesuffix(INNER)
    check_collective(collective)
    crossed = [
        _Crossing(level, inside.ranks_per_group, span.ranks_per_group, inside.num_groups,
                  span.num_groups, link)
        for level, (inside, span, link) in enumerate(
            zip([Span(num_ranks, 1), *spans], spans, links, strict=False)
        )
        if span.num_groups < inside.num_groups
    ]  # fmt: skip
    measured = any(c.link.measured(action) for c in crossed)
    if backend == "nccl" and not measured:
        return _fastest(list(_nccl_lines(collective, num_ranks, crossed)))
    return _measured_lines(collective, num_ranks, crossed, [c.link.rate(action) for c in crossed])


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Link level l that an axis crosses: r_{l-1}, r_l, g_{l-1} and g_l."""

    level: int
    ranks_inside: int
    ranks: int
    groups_inside: int
    groups: int
    link: Link

    @property
    def branches(self) -> float:
        """Number of groups of the next inner level in a group: g_{l-1} / g_l."""
        return self.groups_inside / self.groups

    @property
    def tree_volume(self) -> int:
        """Times a tensor passes the link of a group in double binary trees: v_l."""
        return 1 if self.groups_inside == 2 * self.groups else 2


def _measured_lines(
    action: str, num_ranks: int, crossings: Sequence[_Crossing], rates: Sequence[Rate]
) -> list[Line]:
    if action == "all_to_all":
        rounds = [c.ranks - c.ranks_inside for c in crossings]
        return [_slowest(rounds, _exchanged(num_ranks, crossings), rates)]
    if action == "halo_exchange":
        return [_neighbours(rates)]
    passes = 2 if action == "all_reduce" else 1
    ring, stages = _ring(num_ranks, crossings, rates), _stages(crossings, rates)
    stages = stages._replace(slope=max(ring.slope, stages.slope))
    return [Line(passes * x.fixed, passes * x.slope, ring.bends) for x in (ring, stages)]


def _stages(crossings: Sequence[_Crossing], rates: Sequence[Rate]) -> Line:
    found = list(zip(crossings, rates, strict=True))
    return Line(
        sum(ceil(log2(c.branches)) * rate.latency for c, rate in found),
        sum((1 / c.ranks_inside - 1 / c.ranks) / rate.bandwidth for c, rate in found),
    )


def _nccl_lines(action: str, num_ranks: int, crossings: Sequence[_Crossing]) -> Iterable[Line]:
    for name, algorithm in _NCCL[action].items():
        rates = [rate for c in crossings if (rate := c.link.algorithm(name)) is not None]
        if len(rates) == len(crossings):
            for line in algorithm(num_ranks, crossings, rates):
                yield line._replace(fixed=line.fixed + rates[-1].overhead)


def _fastest(found: Sequence[Line]) -> list[Line]:
    """The lines that are the minimum at some size: their lower envelope, unless one has bends."""
    kept: list[Line] = []
    for line in sorted(found):
        if line.bends:
            return sorted(found)
        if kept and line.slope >= kept[-1].slope:
            continue
        while len(kept) > 1 and _meeting(kept[-2], line) <= _meeting(kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    return kept


def _meeting(low: Line, flat: Line) -> float:
    """Bytes from which a line of larger overhead and smaller slope is faster."""
    return (flat.fixed - low.fixed) / (low.slope - flat.slope)


def _ring(num_ranks: int, crossings: Sequence[_Crossing], rates: Sequence[Rate]) -> Line:
    volume = (num_ranks - 1) / num_ranks
    steps = [c.groups_inside - c.groups for c in crossings]
    return _slowest(steps, [volume / c.ranks_inside for c in crossings], rates)


def _ring_once(
    num_ranks: int, crossings: Sequence[_Crossing], rates: Sequence[Rate]
) -> Iterable[Line]:
    yield _ring(num_ranks, crossings, rates)


def _ring_twice(
    num_ranks: int, crossings: Sequence[_Crossing], rates: Sequence[Rate]
) -> Iterable[Line]:
    line = _ring(num_ranks, crossings, rates)
    yield Line(2 * line.fixed, 2 * line.slope, line.bends)


def _tree(_: int, crossings: Sequence[_Crossing], rates: Sequence[Rate]) -> Iterable[Line]:
    steps = [2 * (log2(c.branches) if c.level else c.ranks - 1) for c in crossings]
    volumes = [c.tree_volume / c.ranks_inside for c in crossings]
    yield _slowest(steps, volumes, rates)


def _nvls(_: int, crossings: Sequence[_Crossing], rates: Sequence[Rate]) -> Iterable[Line]:
    inner, *outer = crossings
    if inner.level or inner.ranks <= 2:  # noqa: PLR2004  NCCL offers it to larger groups
        return
    steps = [1.0, *(2 * log2(c.branches) for c in outer)]
    volumes = [1 + 1 / inner.ranks, *(c.tree_volume / c.ranks_inside for c in outer)]
    yield _slowest(steps, volumes, rates)


def _nvls_once(_: int, crossings: Sequence[_Crossing], rates: Sequence[Rate]) -> Iterable[Line]:
    inner, *outer = crossings
    if not outer and inner.level == 0 and inner.ranks > 2:  # noqa: PLR2004  as for _nvls
        yield _slowest([1.0], [1.0], rates)


def _all_to_all(
    num_ranks: int, crossings: Sequence[_Crossing], rates: Sequence[Rate]
) -> Iterable[Line]:
    rounds = [c.branches - 1 for c in crossings]
    yield _slowest(rounds, _exchanged(num_ranks, crossings), rates)


def _exchanged(num_ranks: int, crossings: Sequence[_Crossing]) -> list[float]:
    """Share of a rank's tensor that leaves its group of the next inner level."""
    return [1 - c.ranks_inside / num_ranks for c in crossings]


def _halo_exchange(_: int, __: Sequence[_Crossing], rates: Sequence[Rate]) -> Iterable[Line]:
    yield _neighbours(rates)


def _neighbours(rates: Sequence[Rate]) -> Line:
    line = _slowest([0] * len(rates), [1.0] * len(rates), rates)
    return line._replace(fixed=max(rate.latency for rate in rates))


_Algorithm = Callable[[int, Sequence[_Crossing], Sequence[Rate]], Iterable[Line]]
_RINGS: dict[str, _Algorithm] = {f"ring {protocol}": _ring_once for protocol in PROTOCOLS}

_NCCL: MappingProxyType[str, dict[str, _Algorithm]] = MappingProxyType(
    {
        "all_gather": {**_RINGS, "NVLS": _nvls_once},
        "reduce_scatter": {**_RINGS, "NVLS": _nvls_once},
        "all_reduce": {
            **dict.fromkeys(_RINGS, _ring_twice),
            **{f"tree {protocol}": _tree for protocol in PROTOCOLS},
            "NVLS": _nvls,
        },
        "all_to_all": {"all_to_all": _all_to_all},
        "halo_exchange": {"send": _halo_exchange},
    }
)
"""NCCL's algorithms of each collective."""


def _slowest(steps: Sequence[float], volumes: Sequence[float], rates: Sequence[Rate]) -> Line:
    """Line of steps one after the other, and of bytes on all levels at the same time.

    Args:
        steps: number of steps at each level.
        volumes: bytes over a device's link at each level, relative to those of the tensor.
        rates: rate of each level.
    """
    slopes = [volume / rate.bandwidth for volume, rate in zip(volumes, rates, strict=True)]
    slope = max(slopes)
    rate = rates[slopes.index(slope)]
    inverses = [1.0, *(rate.bandwidth / bend.bandwidth for bend in rate.bends)]
    growths = (after - before for before, after in pairwise(inverses))
    return Line(
        sum(number * rate.latency for number, rate in zip(steps, rates, strict=True)),
        slope,
        tuple((bend.nbytes, growth) for bend, growth in zip(rate.bends, growths, strict=True)),
    )
