"""What each strategy costs at least: exact over a spanning forest, messages elsewhere.

After messages have been passed, a single place often cannot tell a good strategy from a bad
one: what makes the difference is spread over the places around it. Min-marginals over a
forest of bonds gather it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.solve.narrowing.messages import Messages


@dataclass(frozen=True, slots=True)
class _Branch:
    """A place of a tree and the bond to its parent; a root has none."""

    place: int
    parent: int = -1
    bond: int = -1
    is_source: bool = False
    """Whether the parent is the bond's source."""


def strategy_bounds(messages: Messages) -> tuple[float, list[FloatArray]]:
    """Lower bounds by choosing exactly along a forest of bonds.

    Returns:
        a lower bound of all choices, and for each place a lower bound of all choices with
        each strategy at one of its nodes, shape [S].
    """
    trees = list(_trees(messages))
    used = {branch.bond for tree in trees for branch in tree}
    least = np.zeros(len(messages.folded.places))
    above: dict[int, FloatArray] = {}
    for tree in trees:
        root = tree[0].place
        prices = _passed(messages, tree)
        least[root] = prices[root].min()
        for place, price in prices.items():
            above[place] = price - least[root] if np.isfinite(least[root]) else price
    bound = messages.proven(least)
    for number, slot in enumerate(messages.folded.slots):
        if used.isdisjoint(bond for bond, _ in slot.bonds):
            left = messages.offered(number) - messages.values[number]
            above[slot.place] += (
                messages.folded.weight(number) * left[messages.views[number].classes]
            )
    return bound, [bound + above[p] for p in range(len(least))]


def _trees(messages: Messages) -> Iterator[list[_Branch]]:
    """A spanning forest, each tree from its root; bonds whose messages say most come first."""
    folded = messages.folded
    weights = [
        np.ptp(messages.values[bond.source]) + np.ptp(messages.values[bond.target])
        for bond in folded.bonds
    ]
    around: dict[int, list[_Branch]] = {p: [] for p in range(len(folded.places))}
    joined = list(range(len(folded.places)))

    def root_of(p: int) -> int:
        while joined[p] != p:
            joined[p] = p = joined[joined[p]]
        return p

    for bond in sorted(range(len(folded.bonds)), key=lambda b: -weights[b]):
        ends = [folded.slots[s] for s in (folded.bonds[bond].source, folded.bonds[bond].target)]
        source, target = (end.place for end in ends)
        # One edge per node at both ends, so that the forest is one in the problem, too.
        sizes = {len(folded.places[source].nodes), len(folded.places[target].nodes)}
        sizes |= {end.num_edges for end in ends}
        if len(sizes) == 1 and root_of(source) != root_of(target):
            joined[root_of(source)] = root_of(target)
            around[source].append(_Branch(target, source, bond, is_source=True))
            around[target].append(_Branch(source, target, bond, is_source=False))
    seen: set[int] = set()
    for root in around:
        if root not in seen:
            seen.add(root)
            tree = [_Branch(root)]
            for branch in tree:
                fresh = [b for b in around[branch.place] if b.place not in seen]
                seen.update(b.place for b in fresh)
                tree.extend(fresh)
            yield tree


def _passed(messages: Messages, tree: list[_Branch]) -> dict[int, FloatArray]:
    """Least price of a tree by strategy of each of its places, shape [S]."""
    prices = {branch.place: messages.prices(branch.place) for branch in tree}
    told: dict[int, FloatArray] = {}
    for branch in reversed(tree[1:]):
        near, _ = _slots(messages, branch)
        told[branch.place] = _over(messages, branch, prices[branch.place], up=True)
        prices[branch.parent] += told[branch.place][messages.views[near].classes]
    for branch in tree[1:]:
        near, far = _slots(messages, branch)
        with np.errstate(invalid="ignore"):
            rest = prices[branch.parent] - told[branch.place][messages.views[near].classes]
        rest = np.where(np.isnan(rest), np.inf, rest)
        down = _over(messages, branch, rest, up=False)
        prices[branch.place] += down[messages.views[far].classes]
    return prices


def _slots(messages: Messages, branch: _Branch) -> tuple[int, int]:
    """The slots of a branch's bond at the parent and at the place itself."""
    bond = messages.folded.bonds[branch.bond]
    return (bond.source, bond.target) if branch.is_source else (bond.target, bond.source)


def _over(messages: Messages, branch: _Branch, prices: FloatArray, *, up: bool) -> FloatArray:
    """Least price of one end of a branch's bond and what the bond has left, by class."""
    here, there = _slots(messages, branch)
    if not up:
        here, there = there, here
    beyond = messages.views[there].least(prices) - messages.values[there]
    is_source = branch.is_source == up
    return messages.through(branch.bond, beyond, is_source=is_source) - messages.values[here]
