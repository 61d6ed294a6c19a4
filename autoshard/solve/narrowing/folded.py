"""A problem with its runs folded: groups that are alike are looked at once.

A place stands for as many nodes as there are groups, and a bond for as many edges. What is
the same for all of them, such as messages, costs the same at any depth.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.solve.problem import Edge, Problem
from autoshard.solve.repeats import Run, covered_edges

_LEAST_GROUPS = 4
"""Groups of a run from which on folding it makes fewer places."""


@dataclass(slots=True, eq=False)
class Slot:
    """One end of alike edges, as each node of a place sees it.

    Attributes:
        place: number of the place.
        backward: whether the edges lead to nodes that come earlier.
        num_edges: edges with this end, of all nodes of the place together.
        bonds: number of each bond with this end, and whether the end is its source.
    """

    place: int
    backward: bool
    num_edges: int = 0
    bonds: list[tuple[int, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Nodes that are alike.

    Attributes:
        nodes: the nodes, in the order of their groups.
        slots: numbers of the slots through which they are linked.
    """

    nodes: tuple[int, ...]
    slots: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Bond:
    """Edges that are alike.

    Attributes:
        edge: an edge with the same content.
        source: slot at their sources.
        target: slot at their targets.
    """

    edge: Edge
    source: int
    target: int


class Folded:
    """The places and bonds of a problem.

    Every node is of one place and every edge of one bond. The first and the last group of a
    run stay as they are, since what is good for them may not be for the rest; messages that
    had to be the same for all would prove less.

    Args:
        problem: the problem.
        runs: disjoint runs in it; what one sees of another is the ports of its last group.

    Attributes:
        runs: the runs, whole.
        places: all places.
        slots: all slots.
        bonds: all bonds.
        place_of: number of the place of each node.
    """

    def __init__(self, problem: Problem, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self.places: list[Place] = []
        self.slots: list[Slot] = []
        self.bonds: list[Bond] = []
        self.place_of: dict[int, int] = {}
        self._slot_of: dict[tuple[int, int, bool], int] = {}
        inner = [_inner(run) for run in runs if len(run.instances) >= _LEAST_GROUPS]
        for nodes in sorted(_alike_nodes(problem, inner)):
            self.place_of.update(dict.fromkeys(nodes, len(self.places)))
            self.places.append(Place(nodes))
        for edge in covered_edges(problem, inner):
            self._bond(edge, self.place_of[edge.source], self.place_of[edge.target], 1)
        for run in inner:
            for edge in _edges_of_second(problem, run):
                self._bind(edge, _alike_edges(run, edge))

    def weight(self, slot: int) -> float:
        """Edges that each node of a place has at one of its slots."""
        return self.slots[slot].num_edges / len(self.places[self.slots[slot].place].nodes)

    def far_end(self, bond: int, *, is_source: bool) -> int:
        """The slot at the other end of a bond."""
        return self.bonds[bond].target if is_source else self.bonds[bond].source

    def _bind(self, edge: Edge, alike: Iterable[tuple[int, int]]) -> None:
        """One bond for each pair of places that are joined by edges like a given one."""
        joined = Counter((self.place_of[u], self.place_of[v]) for u, v in alike)
        for (source, target), number in joined.items():
            self._bond(edge, source, target, number)

    def _bond(self, edge: Edge, source: int, target: int, number: int) -> None:
        made = []
        for place, is_source in ((source, True), (target, False)):
            slot = self._slot(place, edge, is_source=is_source)
            self.slots[slot].num_edges += number
            self.slots[slot].bonds.append((len(self.bonds), is_source))
            made.append(slot)
        self.bonds.append(Bond(edge, *made))

    def _slot(self, place: int, edge: Edge, *, is_source: bool) -> int:
        key = (place, id(edge), is_source)
        if key not in self._slot_of:
            self._slot_of[key] = len(self.slots)
            self.places[place].slots.append(len(self.slots))
            self.slots.append(Slot(place, (edge.target < edge.source) == is_source))
        return self._slot_of[key]


def _inner(run: Run) -> Run:
    """A run without its first and its last group."""
    before = tuple(run.instances[0][p] for p in run.ports)
    return Run(run.instances[1:-1], run.ports, before, run.hubs)


def _alike_nodes(problem: Problem, runs: Sequence[Run]) -> Iterator[tuple[int, ...]]:
    """The nodes of each place; what follows a run is linked to the ports of its last group."""
    inside = {v for run in runs for group in run.instances for v in group}
    yield from ((v,) for v in range(len(problem.nodes)) if v not in inside)
    for run in runs:
        for p, nodes in enumerate(zip(*run.instances, strict=True)):
            if p in run.ports:
                yield nodes[:-1]
                yield nodes[-1:]
            else:
                yield nodes


def _edges_of_second(problem: Problem, run: Run) -> list[Edge]:
    """Edges of a run's second group: inside it, to the group before it, to hubs."""
    group = set(run.instances[1])
    around = group | set(run.before_of(1)) | set(run.hubs)
    return [
        edge
        for edge in problem.edges
        if {edge.source, edge.target} <= around and not {edge.source, edge.target}.isdisjoint(group)
    ]


def _alike_edges(run: Run, edge: Edge) -> Iterator[tuple[int, int]]:
    """Source and target of the edges of each group that are like one of the second group."""
    inside = {v: p for p, v in enumerate(run.instances[1])}
    before = {v: p for p, v in enumerate(run.before_of(1))}

    def counterpart(v: int, k: int) -> int:
        if v in inside:
            return run.instances[k][inside[v]]
        return run.before_of(k)[before[v]] if v in before else v

    for k in range(len(run.instances)):
        yield counterpart(edge.source, k), counterpart(edge.target, k)
