"""Detection of repeated blocks, such as the layers of a transformer.

A block is a sequence of nodes that is repeated consecutively in the program, with the same
operators, attributes, shapes and connections. Names and modules are ignored. An input of a block
instance is one of its own parameters, an output of the previous instance, or a value that all
instances share, such as a mask. All instances but the first have the same gradients; the first may
lack some, if what enters it comes from the data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from autoshard.base.arrays import BoolArray, IntArray
from autoshard.base.memo import kept_in_argument
from autoshard.graph.ir import Graph

_MIN_LENGTH = 4
"""Minimum number of nodes of a block."""
_MAX_PERIODS = 12
"""Maximum number of layers that repeat together."""


@dataclass(frozen=True, slots=True)
class Block:
    """A sequence of nodes and its repetitions.

    Attributes:
        start: index of the first node of the first instance.
        length: number of nodes of one instance.
        count: number of instances.
    """

    start: int
    length: int
    count: int

    @property
    def stop(self) -> int:
        """Index after the last node of the last instance."""
        return self.start + self.length * self.count

    def instances(self) -> Iterator[range]:
        """Yield the node indices of each instance."""
        for first in range(self.start, self.stop, self.length):
            yield range(first, first + self.length)


@kept_in_argument
def find_blocks(graph: Graph) -> tuple[Block, ...]:
    """Find all repeated blocks of a program, in program order and without overlap.

    If a run can be divided into instances in several ways, the division with the fewest values
    passed from one instance to the next is used. In a part of a larger program, a block that is
    repeated only there has one instance.
    """
    wiring = _Wiring(graph)
    found: list[Block] = []
    free = np.ones(len(graph.nodes), dtype=bool)
    for kinds in dict.fromkeys((graph.kinds_without_gradients, graph.kinds)):
        untried = free.copy()
        while (run := _longest_run(np.array(kinds, dtype=np.intp), untried)) is not None:
            first, length, size = run
            untried[first : first + size] = False
            block = _largest_block(wiring, first, length, size)
            parts = [] if block is None else _by_gradients(block, graph.kinds)
            if parts:
                found += parts
                free[first : first + size] = False
    covered = {i for block in found for i in range(block.start, block.stop)}
    found += [
        Block(first, last - first, 1)
        for first, last in graph.layers
        if covered.isdisjoint(range(first, last))
    ]
    return tuple(sorted(found, key=lambda block: block.start))


def _largest_block(wiring: "_Wiring", first: int, length: int, size: int) -> Block | None:
    """The block that covers most of a run, of one period or of several.

    Layers that are alike but for what they share, such as the masks of sliding and of full
    attention, repeat together.
    """
    best: Block | None = None
    for periods in range(1, _MAX_PERIODS + 1):
        if 2 * periods * length > size:
            break
        block = wiring.best_block(first, periods * length, size)
        covered = 0 if best is None else best.stop - best.start
        if block is not None and block.stop - block.start > covered + length:
            best, covered = block, block.stop - block.start
        if covered > size - (periods + 1) * length:
            break
    return best


def _by_gradients(block: Block, kinds: Sequence[int]) -> list[Block]:
    """The parts of a block whose instances, all but the first, have nodes of equal kinds.

    Frozen layers are another part than trained ones. Empty if an instance is in no part.
    """
    instances = [kinds[nodes.start : nodes.stop] for nodes in block.instances()]
    counts: list[int] = []
    for equal in (len(list(group)) for _, group in groupby(instances)):
        joins = counts[-1:] == [1] and (equal > 1 or len(counts) == 1)
        counts.append(counts.pop() + equal if joins else equal)
    if 1 in counts:
        return []
    starts = accumulate([block.start, *(count * block.length for count in counts)])
    return [Block(start, block.length, n) for start, n in zip(starts, counts, strict=False)]


def _longest_run(kinds: IntArray, free: BoolArray) -> tuple[int, int, int] | None:
    """First node, period and size of the run that covers the most free nodes.

    Among runs of about the same size, the shortest period is chosen: twelve layers rather than six
    pairs of layers.
    """
    best: tuple[int, int, int] | None = None
    max_size = _longest_true(free)[1]
    for period in range(_MIN_LENGTH, max_size // 2 + 1):
        if best is not None and best[2] + period > max_size:
            break
        same = (kinds[period:] == kinds[:-period]) & free[period:] & free[:-period]
        first, length = _longest_true(same)
        if length < period:
            continue
        size = length + period
        if best is None or size > best[2] + period:
            best = (first, period, size)
    return best


def _longest_true(flags: BoolArray) -> tuple[int, int]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.view(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


class _Wiring:
    """Producers of every node's inputs, to compare nodes that are one period apart."""

    def __init__(self, graph: Graph) -> None:
        self._inputs = [node.inputs for node in graph.nodes]
        self._made = {
            value: (i, slot)
            for i, node in enumerate(graph.nodes)
            for slot, value in enumerate(node.outputs)
        }
        self._users = {v: [i for i, _ in uses] for v, uses in graph.consumers.items()}

    def best_block(self, first: int, length: int, size: int) -> Block | None:
        """The longest block in a run; among those, the one with the fewest values passed on."""
        strict = [self._follows(i, length) for i in range(first + length, first + size)]
        loose = [
            follows or self._follows(i, length, from_start=first + 2 * length)
            for i, follows in enumerate(strict, start=first + length)
        ]
        # Prefix sums count the nodes that do not repeat, so a range repeats if the count is equal.
        broken, broken_loosely = _prefix_sums(strict), _prefix_sums(loose)
        crossing = self._crossing_values(first, size)
        candidates = []
        for phase in range(min(length, size - 2 * length + 1)):
            pieces = range(phase, size - 2 * length + 1, length)
            links = [broken[p + length] == broken[p] for p in pieces]
            starts = [broken_loosely[p + length] == broken_loosely[p] for p in pieces]
            begin, count = _longest_chain(starts, links)
            start = first + phase + begin * length
            if count:
                num_crossing = crossing[start + length - first]
                candidates.append((-count, num_crossing, start, Block(start, length, count + 1)))
        return min(candidates)[3] if candidates else None

    def _follows(self, i: int, length: int, *, from_start: int | None = None) -> bool:
        """True if the inputs of a node correspond to those of the node one period earlier.

        Args:
            i: index of the node.
            length: the period.
            from_start: if given, the earlier node may be in the first instance, which gets from
                outside what other instances get from the previous instance.
        """
        for value, earlier in zip(self._inputs[i], self._inputs[i - length], strict=True):
            made, made_earlier = self._made.get(value), self._made.get(earlier)
            if made is not None and made_earlier is not None:
                same = (made[0] - length, made[1]) == made_earlier and i - made[0] < 2 * length
            else:
                same = made is made_earlier and self._is_own(value, earlier, length)
            if from_start is not None and made is not None and made[0] < i:
                outside = made_earlier is None or made_earlier[0] < i - length
                same = same or (outside and i - made[0] < 2 * length)
            if not same and value != earlier:
                return False
        return True

    def _is_own(self, value: str, earlier: str, length: int) -> bool:
        """True if two graph inputs are used by corresponding nodes, one period apart."""
        return self._users[value] == [i + length for i in self._users[earlier]]

    def _crossing_values(self, first: int, size: int) -> IntArray:
        """Number of values produced in a run before each position and used after it."""
        crossing = np.zeros(size + 2, dtype=np.intp)
        for value, (maker, _) in self._made.items():
            last = max(self._users[value], default=maker)
            if first <= maker < first + size and last > maker:
                crossing[maker + 1 - first] += 1
                crossing[min(last + 1 - first, size + 1)] -= 1
        return np.cumsum(crossing)


def _prefix_sums(flags: Sequence[bool]) -> IntArray:
    """Number of false flags before each position."""
    return np.concatenate(([0], np.cumsum(~np.array(flags, dtype=bool))))


def _longest_chain(starts: Sequence[bool], links: Sequence[bool]) -> tuple[int, int]:
    """Begin and length of the longest chain; its first flag may come from `starts`."""
    best = (0, 0)
    begin = 0
    for k in range(len(links) + 1):
        if k == len(links) or not (links[k] or (k == begin and starts[k])):
            if k - begin > best[1]:
                best = (begin, k - begin)
            begin = k if k < len(links) and starts[k] and not links[k] and k > begin else k + 1
    return best
