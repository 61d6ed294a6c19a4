"""Linear programs over cuts: where the choices seen so far promise most.

A relaxation's bound is the least of many linear functions of its prices, one per choice
(Kelley, J. SIAM 8:703, 1960). Each choice that has been seen gives one of them, so together
they are an upper estimate of the bound.
"""

import numpy as np
from scipy.optimize import linprog

from autoshard.arrays import FloatArray


def best_prices(price: FloatArray, slope: FloatArray, box: float) -> tuple[FloatArray, float]:
    """The prices at which cuts promise the largest bound, and that promise.

    Args:
        price: constant of each cut, shape [C].
        slope: its slope in each price, shape [C, T].
        box: largest price to look at.

    Returns:
        prices, shape [T], and the least of `price + slope @ prices` there; zeros and -inf
        where the linear program fails.
    """
    slope = slope * box
    shift, unit = float(price.min()), max(float(np.ptp(price)), float(np.abs(slope).max()), 1e-300)
    answer = linprog(
        np.append(np.zeros(slope.shape[1]), -1.0),
        A_ub=np.hstack([-slope / unit, np.ones((len(price), 1))]),
        b_ub=(price - shift) / unit,
        bounds=[(0.0, 1.0)] * slope.shape[1] + [(None, None)],
        method="highs",
    )
    if answer.x is None:
        return np.zeros(slope.shape[1]), -float("inf")
    return answer.x[:-1] * box, float(answer.x[-1]) * unit + shift


def best_mixture(values: FloatArray) -> FloatArray:
    """Shares, shape [T], that add up to one and whose least mean over all cuts is largest.

    Args:
        values: of each cut at each place, shape [C, T].
    """
    unit = max(float(np.abs(values).max()), 1e-300)
    num_cuts, num_places = values.shape
    answer = linprog(
        np.append(np.zeros(num_places), -1.0),
        A_ub=np.hstack([-values / unit, np.ones((num_cuts, 1))]),
        b_ub=np.zeros(num_cuts),
        A_eq=np.append(np.ones(num_places), 0.0)[None],
        b_eq=np.ones(1),
        bounds=[(0.0, 1.0)] * num_places + [(None, None)],
        method="highs",
    )
    if answer.x is None:
        return np.full(num_places, 1.0 / num_places)
    shares = np.maximum(answer.x[:-1], 0.0)
    return np.asarray(shares / shares.sum())


def cheapest_mixture(price: FloatArray, excess: FloatArray) -> FloatArray:
    """Shares of choices, shape [C], that add up to one and whose mean excess is nowhere positive.

    Args:
        price: of each choice, shape [C].
        excess: of each choice at each place, shape [C, T].

    Returns:
        the cheapest shares; zeros where there are none.
    """
    known = np.isfinite(price)
    shift, unit = float(price[known].min()), max(float(np.ptp(price[known])), 1e-300)
    scale = np.maximum(np.abs(excess[known]).max(axis=0), 1e-300)
    answer = linprog(
        (price[known] - shift) / unit,
        A_ub=(excess[known] / scale).T,
        b_ub=np.zeros(excess.shape[1]),
        A_eq=np.ones((1, int(known.sum()))),
        b_eq=np.ones(1),
        bounds=(0.0, 1.0),
        method="highs",
    )
    shares = np.zeros(len(price))
    if answer.x is not None:
        shares[known] = np.maximum(answer.x, 0.0)
    return shares
