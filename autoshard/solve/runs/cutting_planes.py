"""Linear programs over the choices found by a Lagrangian relaxation."""

import numpy as np

from autoshard.base.arrays import FloatArray


def best_prices(price: FloatArray, slope: FloatArray, box: float) -> tuple[FloatArray, float]:
    """Maximise the least of the cutting planes `price + slope @ prices` over prices in [0, box].

    Args:
        price: constant of each cutting plane, shape [C].
        slope: its slope in each price, shape [C, T].
        box: upper bound of the prices.

    Returns:
        the prices, shape [T], and the maximum; zeros and -inf if the linear program fails.
    """
    # Tolerances of HiGHS are absolute, so prices, slopes and costs are scaled to about one.
    slope = slope * box
    shift, unit = float(price.min()), max(float(np.ptp(price)), float(np.abs(slope).max()), 1e-300)
    answer = _maximin((price - shift) / unit, slope / unit)
    if answer is None:
        return np.zeros(slope.shape[1]), -float("inf")
    return answer[:-1] * box, float(answer[-1]) * unit + shift


def best_mixture(values: FloatArray) -> FloatArray:
    """Maximise the least of `values @ shares` over shares, shape [T], that add up to one.

    Args:
        values: shape [C, T].
    """
    num_cuts, num_places = values.shape
    unit = max(float(np.abs(values).max()), 1e-300)
    answer = _maximin(np.zeros(num_cuts), values / unit, shares=True)
    if answer is None:
        return np.full(num_places, 1.0 / num_places)
    shares = np.maximum(answer[:-1], 0.0)
    return np.asarray(shares / shares.sum())


def _maximin(price: FloatArray, slope: FloatArray, *, shares: bool = False) -> FloatArray | None:
    """Maximise the least of `price + slope @ x` over x in [0, 1]; with `shares`, x sums to one.

    Returns:
        x followed by the maximum; None if the linear program fails.
    """
    # It takes long to import, and plans that fit memory at once do not need it.
    from scipy.optimize import linprog  # noqa: PLC0415

    answer = linprog(
        np.append(np.zeros(slope.shape[1]), -1.0),
        A_ub=np.hstack([-slope, np.ones((len(price), 1))]),
        b_ub=price,
        A_eq=np.append(np.ones(slope.shape[1]), 0.0)[None] if shares else None,
        b_eq=np.ones(1) if shares else None,
        bounds=[(0.0, 1.0)] * slope.shape[1] + [(None, None)],
        method="highs",
    )
    return None if answer.x is None else np.asarray(answer.x)
