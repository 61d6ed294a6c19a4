"""Fitting of topologies and devices to measurements.

A collective over one link level takes `o + k lat + v (B / bw + sum_i max(B - b_i, 0) e_i)`
seconds, where k and v follow from the collective and its ranks (`autoshard.mesh.collectives`),
and e_i is the additional time per byte beyond b_i. The overhead o is shared; each collective has
its own lat, bw and e_i per level. The fit minimises the squared relative errors with non-negative
least squares (Lawson and Hanson, "Solving Least Squares Problems", 1974), so that short messages
count as much as long ones. Measurements that other work has disturbed count less: errors are
weighted as by Huber ("Robust Estimation of a Location Parameter", 1964).

A matrix product takes `o + flops / (peak * efficiency)`, where the efficiency decreases for small
extents (`autoshard.costs.compute`); several tile sizes are tried. An operator takes
`overhead + times * roofline`, separately in forward and backward.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from autoshard.errors import MeshError
from autoshard.mesh.collectives import Line, Span, lines
from autoshard.mesh.topology import (
    MATMUL_EFFICIENCY,
    Bend,
    Device,
    Link,
    OperatorFit,
    Rate,
    RooflineFit,
)

REFERENCE = "all_gather"
"""The collective whose rate a link has for all that were not measured."""

BENDS = tuple(1 << exponent for exponent in (20, 22, 24, 26))
"""Sizes in bytes at which a collective may become slower."""

_NUM_COEFFICIENTS = 2 + len(BENDS)

_MIN_RELATIVE_TIME = 0.01
"""Minimum time per byte where none is measurable, relative to larger messages."""


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """A measured collective.

    Attributes:
        action: name of the collective.
        level: index of the only link level that it crosses.
        num_ranks: number of ranks.
        nbytes: bytes of a rank's tensor before or after, whichever is larger.
        seconds: median over several runs of the time of the slowest rank.
    """

    action: str
    level: int
    num_ranks: int
    nbytes: int
    seconds: float


def fit_links(
    samples: Sequence[CollectiveSample], levels: Sequence[tuple[str, int | None]]
) -> tuple[tuple[Link, ...], float]:
    """Fit links and the overhead of a collective to measurements.

    Args:
        samples: samples of all-gathers at each level, and of other collectives.
        levels: name and size of each link level, innermost first.

    Raises:
        MeshError: a level has no measured all-gathers, or its times do not grow with the bytes.
    """
    kinds = sorted({(sample.level, sample.action) for sample in samples})
    rows = np.zeros((len(samples), 1 + _NUM_COEFFICIENTS * len(kinds)))
    for row, sample in zip(rows, samples, strict=True):
        first = 1 + _NUM_COEFFICIENTS * kinds.index((sample.level, sample.action))
        row[0] = 1.0
        row[first : first + _NUM_COEFFICIENTS] = _terms(sample)
    solution, _ = _solution(rows, [sample.seconds for sample in samples])
    overhead, *figures = solution.tolist()
    found: list[dict[str, Rate]] = [{} for _ in levels]
    for i, (level, action) in enumerate(kinds):
        where = f"{action} over link {levels[level][0]!r}"
        found[level][action] = _rate(
            figures[_NUM_COEFFICIENTS * i : _NUM_COEFFICIENTS * (i + 1)], where
        )
    links = (_link(name, size, rates) for (name, size), rates in zip(levels, found, strict=True))
    return tuple(links), overhead


def _solution(
    rows: NDArray[np.float64], seconds: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Non-negative coefficients that give the seconds of each row, and the relative errors.

    Errors of more than three standard deviations, as the median error estimates them, count
    linearly instead of quadratically, by iteratively reweighted least squares.
    """
    rows = rows / np.array(seconds)[:, None]
    # Columns differ by many orders of magnitude, so they are normalised.
    scale = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(float).tiny)
    rows = rows / scale
    roots = np.ones(len(rows))
    for _ in range(_NUM_REWEIGHTINGS):
        solution, _ = nnls(rows * roots[:, None], roots)
        errors = np.abs(rows @ solution - 1)
        limit = 3 * max(_DEVIATIONS_PER_MEDIAN * float(np.median(errors)), _PRECISION)
        roots = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, limit)))
        if not (errors > limit).any():
            break
    return solution / scale, errors


_NUM_REWEIGHTINGS = 20
_DEVIATIONS_PER_MEDIAN = 1.4826
"""Standard deviations of a normal distribution per median of the absolute error."""
_PRECISION = 0.02
"""Minimum standard deviation of a measurement's relative error."""


def _terms(sample: CollectiveSample) -> list[float]:
    """Coefficients of latency, inverse bandwidth and each bend."""
    unit = unit_line(sample.action, sample.num_ranks)
    beyond = [max(sample.nbytes - start, 0) for start in BENDS]
    return [unit.fixed, *(unit.slope * nbytes for nbytes in (sample.nbytes, *beyond))]


def _rate(figures: Sequence[float], where: str) -> Rate:
    latency, *growths = figures
    total = list(accumulate(growths))
    if total[-1] <= 0:
        raise MeshError(
            f"the time of {where} does not grow with its bytes; measure larger tensors, or on "
            f"less busy machines"
        )
    # Bytes take some time even if the latency dominates.
    rounding = np.finfo(float).eps * total[-1]
    least = _MIN_RELATIVE_TIME * next(inverse for inverse in total if inverse > rounding)
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
        raise MeshError(f"no {REFERENCE} was measured over link {name!r}, but it is required")
    return Link(name, size, common.bandwidth, common.latency, rates)


def unit_line(action: str, num_ranks: int) -> Line:
    """Price of a collective over one link of latency 1 and bandwidth 1."""
    unit = Link("unit", None, 1.0, 1.0, {action: Rate(1.0, 1.0)})
    return min(lines(action, num_ranks, [Span(1, num_ranks)], [unit], "nccl"))


TILES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tile sizes that are tried."""


@dataclass(frozen=True, slots=True)
class CopySample:
    """A measured copy.

    Attributes:
        nbytes: bytes read and written.
        seconds: the median of several runs.
    """

    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ProductSample:
    """A measured matrix product.

    Attributes:
        dtype: PyTorch's name of the element type.
        extents: number of rows, of terms of each sum, and of columns.
        seconds: the median of several runs.
    """

    dtype: str
    extents: tuple[int, int, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """A measured operator.

    Attributes:
        name: name of the operator (see `costs.efficiency_key`).
        category: cost category of the operator.
        forward: roofline seconds, and measured seconds (median of several runs).
        backward: the same for backward; the roofline is 0 if nothing has a gradient.
    """

    name: str
    category: str
    forward: tuple[float, float]
    backward: tuple[float, float]


def fit_device(
    name: str,
    copies: Iterable[CopySample],
    products: Iterable[ProductSample],
    launch_overhead: float,
    memory: int,
) -> Device:
    """Fit the roofline of a device to measurements.

    Args:
        name: display name.
        copies: copies of several sizes.
        products: products in float32 and other dtypes, of several shapes each.
        launch_overhead: seconds of the smallest kernel.
        memory: memory in bytes.

    Raises:
        MeshError: no copy, or no product in float32, takes longer than a launch.
    """
    rates = [
        c.nbytes / (c.seconds - launch_overhead) for c in copies if c.seconds > launch_overhead
    ]
    if not rates:
        raise MeshError("no copy takes longer than a kernel launch; measure larger tensors")
    by_dtype: dict[str, list[ProductSample]] = defaultdict(list)
    for product in products:
        by_dtype[product.dtype].append(product)
    fits = {
        dtype: [_peak(found, tile) for tile in TILES] for dtype, found in sorted(by_dtype.items())
    }
    errors = [sum(fit[i][1] for fit in fits.values()) for i in range(len(TILES))]
    best = errors.index(min(errors))
    return Device(
        name=name,
        peak_flops={dtype: fit[best][0] for dtype, fit in fits.items() if fit[best][0] > 0},
        memory_bandwidth=median(rates),
        memory=memory,
        launch_overhead=launch_overhead,
        tile=float(TILES[best]),
    )


def _peak(products: Sequence[ProductSample], tile: float) -> tuple[float, float]:
    """Fitted peak in FLOP/s (0 if there is none), and the sum of relative errors."""
    amounts = [_amount(product.extents, tile) for product in products]
    fit, error = _line(amounts, [product.seconds for product in products])
    return (1 / fit.times if fit.times > 0 else 0.0), error


def _amount(extents: Sequence[int], tile: float) -> float:
    """Operations of a product divided by its efficiency."""
    return 2 * prod(extent + tile for extent in extents) / MATMUL_EFFICIENCY


def fit_operators(device: Device, samples: Iterable[OperatorSample]) -> Device:
    """Return the device with fits of measured operators, and of others by category.

    Args:
        device: the device whose roofline the samples refer to.
        samples: samples of each operator in several sizes.
    """
    by_name: dict[str, list[OperatorSample]] = defaultdict(list)
    for sample in samples:
        by_name[sample.name].append(sample)
    fits = {
        name: OperatorFit(_fit([s.forward for s in found]), _fit([s.backward for s in found]))
        for name, found in by_name.items()
    }
    categories: dict[str, list[OperatorFit]] = defaultdict(list)
    for name, found in by_name.items():
        categories[found[0].category].append(fits[name])
    typical = {
        category: OperatorFit(_middle(p.forward for p in found), _middle(p.backward for p in found))
        for category, found in categories.items()
    }
    return replace(device, operators=dict(sorted((typical | fits).items())))


def _fit(points: Sequence[tuple[float, float]]) -> RooflineFit:
    roofline, seconds = zip(*points, strict=True)
    return _line(roofline, seconds)[0]


def _middle(fits: Iterable[RooflineFit]) -> RooflineFit:
    """Median fit; operators without gradients do not count."""
    known = [fit for fit in fits if fit.overhead or fit.times]
    if not known:
        return RooflineFit(0.0, 0.0)
    return RooflineFit(median(p.overhead for p in known), median(p.times for p in known))


def _line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[RooflineFit, float]:
    """Fit of `overhead + times * amount`, and the sum of relative errors."""
    if not any(amounts):
        return RooflineFit(0.0, 0.0), 0.0
    solution, errors = _solution(np.column_stack([np.ones(len(amounts)), amounts]), seconds)
    overhead, times = solution.tolist()
    return RooflineFit(overhead, times), float(errors.sum())
