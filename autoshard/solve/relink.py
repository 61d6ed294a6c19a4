"""Choices on the way from one choice to another (path relinking, Glover 1997).

Where layers repeat, prices on usage make all of them switch at once: one choice is too
large, the next one wasteful, and nothing lies between them. Taking the first layers from
one and the rest from the other is what fills the room, to within one layer.
"""

from collections.abc import Callable

from autoshard.solve.network import Network


def best_between(
    network: Network,
    start: dict[int, int],
    goal: dict[int, int],
    *,
    check: Callable[[], None],
) -> dict[int, int] | None:
    """The cheapest choice within the capacity that takes a prefix from one and the rest of another.

    The prefix is in the order of the variables' indices, which is the order of the layers.

    Args:
        network: a network without ties.
        start: position per variable.
        goal: position per variable.
        check: called now and then; raises to stop.

    Returns:
        a position per variable, or None where nothing on the way fits.
    """
    picks, usage, price = dict(start), network.usage(start), network.price(start)
    best_price, cut = float("inf"), -1
    for v in sorted(network.variables):
        old, new = picks[v], goal[v]
        if old == new:
            continue
        check()
        variable = network.variables[v]
        # A forbidden pair on the way makes the price inf and then NaN: no such point counts.
        price += float(variable.cost[new] - variable.cost[old])
        for w, link in network.links[v].items():
            column = link.matrix.values[link.rows, link.cols[picks[w]]]
            price += float(column[new] - column[old])
        for term in variable.terms:
            usage[term.first : term.last] += term.usage[new] - term.usage[old]
        picks[v] = new
        if price < best_price and (usage <= network.capacity).all():
            best_price, cut = price, v
    if cut < 0:
        return None
    return {v: goal[v] if v <= cut else s for v, s in start.items()}
