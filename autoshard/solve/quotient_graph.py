"""The quotient graph of a problem: groups of a run that are alike are represented once.

A node class stands for as many nodes as there are groups, and an edge class for as many edges.
Whatever is equal for all of them, such as messages, costs the same at any depth.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.solve.problem import Edge, Problem
from autoshard.solve.runs import Run, covered_edges, group_edges

_LEAST_GROUPS = 4
"""Groups of a run from which on folding it makes fewer node classes."""


@dataclass(slots=True, eq=False)
class Port:
    """One end of alike edges, as each node of a node class sees it.

    Attributes:
        node_class: number of the node class.
        backward: whether the edges lead to nodes that come earlier.
        num_edges: edges with this end, of all nodes of the node class together.
        edge_classes: number of each edge class with this end, and whether the end is its source.
    """

    node_class: int
    backward: bool
    num_edges: int = 0
    edge_classes: list[tuple[int, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class NodeClass:
    """Nodes that are alike.

    Attributes:
        nodes: the nodes, in the order of their groups.
        ports: numbers of the ports through which they are linked.
    """

    nodes: tuple[int, ...]
    ports: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class EdgeClass:
    """Edges that are alike.

    Attributes:
        edge: an edge with the same content.
        source: port at their sources.
        target: port at their targets.
    """

    edge: Edge
    source: int
    target: int


class QuotientGraph:
    """The node classes and edge classes of a problem.

    Every node is of one node class and every edge of one edge class. The first and the last group
    of a run stay as they are, since what is good for them may not be for the rest; messages that
    had to be the same for all would prove less.

    Args:
        problem: the problem.
        runs: disjoint runs in it; what one sees of another is the ports of its last group.

    Attributes:
        runs: the runs, whole.
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
        for edge in covered_edges(problem, inner):
            self._add_edge_class(edge, self.class_of[edge.source], self.class_of[edge.target], 1)
        for run in inner:
            for edge in group_edges(problem, run):
                self._bind(edge, _alike_edges(run, edge))

    def weight(self, port: int) -> float:
        """Edges that each node of a node class has at one of its ports."""
        return self.ports[port].num_edges / len(
            self.node_classes[self.ports[port].node_class].nodes
        )

    def far_end(self, edge_class: int, *, is_source: bool) -> int:
        """The port at the other end of an edge class."""
        return (
            self.edge_classes[edge_class].target
            if is_source
            else self.edge_classes[edge_class].source
        )

    def _bind(self, edge: Edge, alike: Iterable[tuple[int, int]]) -> None:
        """One edge class for each pair of node classes joined by edges like a given one."""
        joined = Counter((self.class_of[u], self.class_of[v]) for u, v in alike)
        for (source, target), number in joined.items():
            self._add_edge_class(edge, source, target, number)

    def _add_edge_class(self, edge: Edge, source: int, target: int, number: int) -> None:
        made = []
        for node_class, is_source in ((source, True), (target, False)):
            port = self._port(node_class, edge, is_source=is_source)
            self.ports[port].num_edges += number
            self.ports[port].edge_classes.append((len(self.edge_classes), is_source))
            made.append(port)
        self.edge_classes.append(EdgeClass(edge, *made))

    def _port(self, node_class: int, edge: Edge, *, is_source: bool) -> int:
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
    """The nodes of each node class; what follows a run is linked to the ports of its last group."""
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
    """Source and target of the edges of each group that are like one of the second group."""
    inside = {v: p for p, v in enumerate(run.instances[1])}
    before = {v: p for p, v in enumerate(run.before_of(1))}

    def counterpart(v: int, k: int) -> int:
        if v in inside:
            return run.instances[k][inside[v]]
        return run.before_of(k)[before[v]] if v in before else v

    for k in range(len(run.instances)):
        yield counterpart(edge.source, k), counterpart(edge.target, k)
