"""Figures of a topology fitted to measurements.

A collective over one link level takes `o + k lat + v (B / bw + sum_i max(B - b_i, 0) e_i)`
seconds, where k and v follow from the collective and its ranks (`autoshard.mesh.collectives`),
and e_i is by how much bytes beyond b_i are slower. The overhead o is common to all; each
collective gets its own lat, bw and e_i per level. The fit is the non-negative least squares of
the relative errors (Lawson and Hanson, "Solving Least Squares Problems", 1974), so that short
messages count as much as long ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from scipy.optimize import nnls

from autoshard.errors import MeshError
from autoshard.mesh.collectives import Line, Span, lines
from autoshard.mesh.topology import Bend, Link, Rate

REFERENCE = "all_gather"
"""The collective whose figures a link has for all that were not measured."""

BENDS = tuple(1 << exponent for exponent in (20, 22, 24, 26))
"""Sizes in bytes at which a collective may become slower."""

_NUM_FIGURES = 2 + len(BENDS)

_HIDDEN = 0.01
"""Time of bytes that no measurement shows, as a share of that of those beyond."""


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """A measured collective.

    Attributes:
        action: its name.
        level: number of the link level that it crosses, and no other.
        num_ranks: ranks that take part.
        nbytes: size of the larger of a rank's tensor before and after.
        seconds: how long the slowest rank takes; the median of several runs.
    """

    action: str
    level: int
    num_ranks: int
    nbytes: int
    seconds: float


def fit_links(
    samples: Sequence[CollectiveSample], levels: Sequence[tuple[str, int | None]]
) -> tuple[tuple[Link, ...], float]:
    """Links, and the overhead of a collective, that describe measurements best.

    Args:
        samples: of all-gathers at each level, and of other collectives.
        levels: name and size of each link level, innermost first.

    Raises:
        MeshError: a level has no measured all-gathers, or its times do not grow with the bytes.
    """
    kinds = sorted({(sample.level, sample.action) for sample in samples})
    rows = np.zeros((len(samples), 1 + _NUM_FIGURES * len(kinds)))
    for row, sample in zip(rows, samples, strict=True):
        first = 1 + _NUM_FIGURES * kinds.index((sample.level, sample.action))
        row[0] = 1.0
        row[first : first + _NUM_FIGURES] = _terms(sample)
    rows /= np.array([sample.seconds for sample in samples])[:, None]
    # Columns differ by many orders of magnitude, which the solver does not like.
    scale = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(float).tiny)
    solution, _ = nnls(rows / scale, np.ones(len(samples)))
    overhead, *figures = (solution / scale).tolist()
    found: list[dict[str, Rate]] = [{} for _ in levels]
    for i, (level, action) in enumerate(kinds):
        where = f"{action} over link {levels[level][0]!r}"
        found[level][action] = _rate(figures[_NUM_FIGURES * i : _NUM_FIGURES * (i + 1)], where)
    links = (_link(name, size, rates) for (name, size), rates in zip(levels, found, strict=True))
    return tuple(links), overhead


def _terms(sample: CollectiveSample) -> list[float]:
    """What latency, inverse bandwidth and each bend are multiplied by."""
    unit = unit_line(sample.action, sample.num_ranks)
    beyond = [max(sample.nbytes - start, 0) for start in BENDS]
    return [unit.fixed, *(unit.slope * nbytes for nbytes in (sample.nbytes, *beyond))]


def _rate(figures: Sequence[float], where: str) -> Rate:
    latency, *growths = figures
    total = list(accumulate(growths))
    if total[-1] <= 0:
        raise MeshError(
            f"the time of {where} does not grow with its bytes; measure larger tensors, or on "
            f"machines with less other work"
        )
    # Bytes that the latency hides all the same take some time.
    least = _HIDDEN * next(inverse for inverse in total if inverse > 0)
    inverses = [max(inverse, least) for inverse in total]
    bends = tuple(
        Bend(start, 1 / inverse)
        for start, before, inverse in zip(BENDS, inverses, inverses[1:], strict=False)
        if inverse > before
    )
    return Rate(1 / inverses[0], latency, bends)


def _link(name: str, size: int | None, rates: Mapping[str, Rate]) -> Link:
    common = rates.get(REFERENCE)
    if common is None:
        raise MeshError(f"no {REFERENCE} was measured over link {name!r}; measure it too")
    return Link(name, size, common.bandwidth, common.latency, rates)


def unit_line(action: str, num_ranks: int) -> Line:
    """Price of a collective over one link of latency 1 and bandwidth 1."""
    found = lines(action, num_ranks, [Span(1, num_ranks)], [Link("unit", None, 1.0, 1.0)])
    return min(found)
