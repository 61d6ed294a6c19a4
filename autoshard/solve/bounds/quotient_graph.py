"""The quotient graph of a problem: equal groups of a run are represented once.

A node class has one node per group, and an edge class one edge per group. Messages on the quotient
graph take the same time for any number of groups.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autoshard.solve.problem import Edge, Problem
from autoshard.solve.runs import Run, group_edges, uncovered_edges

T = TypeVar("T")

_LEAST_GROUPS = 4
"""Number of groups from which a quotient of the run has fewer node classes."""


@dataclass(slots=True, eq=False)
class Port:
    """One end of equal edges at a node class.

    Attributes:
        node_class: number of the node class.
        backward: true if the other ends of most of the edges are in earlier node classes.
        num_edges: number of edges with this end, of all nodes of the node class together.
        edge_classes: number of each edge class with this end; true if the end is its source.
    """

    node_class: int
    backward: bool
    num_edges: int = 0
    edge_classes: list[tuple[int, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class NodeClass:
    """Equal nodes of different groups.

    Attributes:
        nodes: the nodes, in the order of their groups.
        ports: numbers of their ports.
    """

    nodes: tuple[int, ...]
    ports: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class EdgeClass:
    """Equal edges of different groups.

    Attributes:
        edge: an edge with the same content.
        source: port of their sources.
        target: port of their targets.
        num_edges: number of the edges.
    """

    edge: Edge
    source: int
    target: int
    num_edges: int


class QuotientGraph:
    """The node classes and edge classes of a problem.

    Every node is in one node class and every edge in one edge class. Nodes of the first and the
    last group of a run are classes of their own: their neighbours differ from those of the inner
    groups, and equal messages for all groups would prove a weaker bound.

    Args:
        problem: the problem.
        runs: disjoint runs; one may be linked to another only at the boundary of its last group.

    Attributes:
        runs: the runs, with their first and last groups.
        node_classes: all node classes.
        ports: all ports.
        edge_classes: all edge classes.
        class_of: number of the node class of each node.
    """

    def __init__(self, problem: Problem, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self.node_classes: list[NodeClass] = []
        self.ports: list[Port] = []
        self.edge_classes: list[EdgeClass] = []
        self.class_of: dict[int, int] = {}
        self._port_of: dict[tuple[int, int, bool], int] = {}
        inner = [_inner(run) for run in runs if len(run.instances) >= _LEAST_GROUPS]
        for nodes in sorted(_alike_nodes(problem, inner)):
            self.class_of.update(dict.fromkeys(nodes, len(self.node_classes)))
            self.node_classes.append(NodeClass(nodes))
        for edge in uncovered_edges(problem, inner):
            self._add_edge_class(edge, self.class_of[edge.source], self.class_of[edge.target], 1)
        for run in inner:
            for edge in group_edges(problem, run):
                self._add_edge_classes(edge, _alike_edges(run, edge))
        self._set_directions()

    def weight(self, port: int) -> float:
        """Mean number of edges at a port per node of its node class."""
        end = self.ports[port]
        return end.num_edges / len(self.node_classes[end.node_class].nodes)

    def far_end(self, edge_class: int, *, is_source: bool) -> int:
        """The port at the other end of an edge class."""
        ends = self.edge_classes[edge_class]
        return ends.target if is_source else ends.source

    def _set_directions(self) -> None:
        """Set the direction of each port, by the order in which node classes pass messages.

        A group links to boundary nodes of the group before it. Their node class is later than those
        of the rest of the group, although each of its nodes is earlier.
        """
        later = [0] * len(self.ports)
        for edge_class in self.edge_classes:
            ends = edge_class.source, edge_class.target
            first = [self.node_classes[self.ports[end].node_class].nodes[0] for end in ends]
            for end, apart in zip(ends, (first[1] - first[0], first[0] - first[1]), strict=True):
                later[end] += edge_class.num_edges * ((apart > 0) - (apart < 0))
        for port, number in zip(self.ports, later, strict=True):
            if number:
                port.backward = number < 0

    def _add_edge_classes(self, edge: Edge, alike: Iterable[tuple[int, int]]) -> None:
        """Add an edge class for each pair of node classes joined by edges equal to a given one."""
        joined = Counter((self.class_of[u], self.class_of[v]) for u, v in alike)
        for (source, target), number in joined.items():
            self._add_edge_class(edge, source, target, number)

    def by_node(self, by_class: Sequence[T]) -> list[T]:
        """Values of node classes as values of nodes."""
        return [by_class[self.class_of[v]] for v in range(len(self.class_of))]

    def _add_edge_class(self, edge: Edge, source: int, target: int, number: int) -> None:
        made = []
        for node_class, is_source in ((source, True), (target, False)):
            port = self._port(node_class, edge, is_source=is_source)
            self.ports[port].num_edges += number
            self.ports[port].edge_classes.append((len(self.edge_classes), is_source))
            made.append(port)
        self.edge_classes.append(EdgeClass(edge, made[0], made[1], number))

    def _port(self, node_class: int, edge: Edge, *, is_source: bool) -> int:
        # By identity: equal edges of different groups come from one edge of the second group, and
        # edges that are only equal by chance may have messages of their own.
        key = (node_class, id(edge), is_source)
        if key not in self._port_of:
            self._port_of[key] = len(self.ports)
            self.node_classes[node_class].ports.append(len(self.ports))
            self.ports.append(Port(node_class, (edge.target < edge.source) == is_source))
        return self._port_of[key]


def _inner(run: Run) -> Run:
    """A run without its first and its last group."""
    before = tuple(run.instances[0][p] for p in run.boundary)
    return Run(run.instances[1:-1], run.boundary, before, run.shared_nodes)


def _alike_nodes(problem: Problem, runs: Sequence[Run]) -> Iterator[tuple[int, ...]]:
    """The nodes of each node class; boundary nodes of the last group are classes of their own."""
    inside = {v for run in runs for group in run.instances for v in group}
    yield from ((v,) for v in range(len(problem.nodes)) if v not in inside)
    for run in runs:
        for p, nodes in enumerate(zip(*run.instances, strict=True)):
            if p in run.boundary:
                yield nodes[:-1]
                yield nodes[-1:]
            else:
                yield nodes


def _alike_edges(run: Run, edge: Edge) -> Iterator[tuple[int, int]]:
    """Source and target of the edge of each group that corresponds to one of the second group."""
    inside = {v: p for p, v in enumerate(run.instances[1])}
    before = {v: p for p, v in enumerate(run.before_of(1))}

    def counterpart(v: int, k: int) -> int:
        if v in inside:
            return run.instances[k][inside[v]]
        return run.before_of(k)[before[v]] if v in before else v

    for k in range(len(run.instances)):
        yield counterpart(edge.source, k), counterpart(edge.target, k)
