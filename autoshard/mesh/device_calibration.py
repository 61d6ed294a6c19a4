"""Figures of a device fitted to measured kernels.

A matrix product takes `o + flops / (peak * efficiency)`, where the efficiency falls as extents
come near the device's tile (`autoshard.costs.compute`); the tile is the one of a few under which
the measurements lie nearest to such a line. An operator takes `overhead + times * roofline`,
forward and backward each. All fits are non-negative least squares of the relative errors.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from autoshard.errors import MeshError
from autoshard.mesh.topology import MATMUL_EFFICIENCY, Device, Pace, Paces

TILES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tiles that are tried."""


@dataclass(frozen=True, slots=True)
class CopySample:
    """A measured copy.

    Attributes:
        nbytes: read and written.
        seconds: the median of several runs.
    """

    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ProductSample:
    """A measured matrix product.

    Attributes:
        dtype: by PyTorch's name.
        extents: rows, terms of a sum, and columns.
        seconds: the median of several runs.
    """

    dtype: str
    extents: tuple[int, int, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """A measured operator.

    Attributes:
        name: by which a device knows the operator.
        category: which formula prices it.
        forward: a pair of seconds: by the roofline, and the median of several runs.
        backward: likewise; the roofline is 0 where nothing has a gradient.
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
    """A device whose roofline goes through what was measured.

    Args:
        name: for people.
        copies: of several sizes.
        products: in float32 and in other dtypes, of several shapes each.
        launch_overhead: seconds that the smallest kernel takes.
        memory: bytes.

    Raises:
        MeshError: no copy, or no product in float32, takes longer than a launch.
    """
    rates = [
        c.nbytes / (c.seconds - launch_overhead) for c in copies if c.seconds > launch_overhead
    ]
    if not rates:
        raise MeshError("no copy takes longer than a launch; measure larger tensors")
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
    """The peak in FLOP/s, 0 where there is none, and the sum of squared relative errors."""
    amounts = [_amount(product.extents, tile) for product in products]
    pace, error = _line(amounts, [product.seconds for product in products])
    return (1 / pace.times if pace.times > 0 else 0.0), error


def _amount(extents: Sequence[int], tile: float) -> float:
    """Operations over the share of the peak that a product of these extents reaches."""
    return 2 * prod(extent + tile for extent in extents) / MATMUL_EFFICIENCY


def fit_paces(device: Device, samples: Iterable[OperatorSample]) -> Device:
    """The device with the paces of measured operators, and of others by category.

    Args:
        device: whose roofline the samples state.
        samples: several sizes of each operator.
    """
    by_name: dict[str, list[OperatorSample]] = defaultdict(list)
    for sample in samples:
        by_name[sample.name].append(sample)
    paces = {
        name: Paces(_pace([s.forward for s in found]), _pace([s.backward for s in found]))
        for name, found in by_name.items()
    }
    categories: dict[str, list[Paces]] = defaultdict(list)
    for name, found in by_name.items():
        categories[found[0].category].append(paces[name])
    typical = {
        category: Paces(_middle(p.forward for p in found), _middle(p.backward for p in found))
        for category, found in categories.items()
    }
    return replace(device, operators=dict(sorted((typical | paces).items())))


def _pace(points: Sequence[tuple[float, float]]) -> Pace:
    roofline, seconds = zip(*points, strict=True)
    return _line(roofline, seconds)[0]


def _middle(paces: Iterable[Pace]) -> Pace:
    """The typical operator; backward of one without gradients says nothing."""
    known = [pace for pace in paces if pace.overhead or pace.times]
    if not known:
        return Pace(0.0, 0.0)
    return Pace(median(p.overhead for p in known), median(p.times for p in known))


def _line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[Pace, float]:
    """`overhead + times * amount` through measurements, and the squared relative errors."""
    if not any(amounts):
        return Pace(0.0, 0.0), 0.0
    rows: NDArray[np.float64] = np.column_stack([np.ones(len(amounts)), amounts])
    rows /= np.array(seconds)[:, None]
    # Columns differ by many orders of magnitude, which the solver does not like.
    scale = np.linalg.norm(rows, axis=0)
    solution, residual = nnls(rows / scale, np.ones(len(amounts)))
    overhead, times = (solution / scale).tolist()
    return Pace(overhead, times), float(residual) ** 2
