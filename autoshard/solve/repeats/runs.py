"""Which of the hinted repetitions really are ones: same prices, same links, in a row."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.solve.closure import Closure
from autoshard.solve.network import fingerprint
from autoshard.solve.problem import Edge, FloatArray, IntArray, Node, Problem

LinkKey = tuple[bool, bytes, bytes, bytes]
"""Content of an edge: whether it starts at the place in question, prices, rows, cols."""


@dataclass(frozen=True)
class Run:
    """Groups of nodes that are alike in prices and links, each linked to the next.

    Attributes:
        instances: nodes of each group, place by place.
        ports: places whose nodes the next group is linked to.
        before: for each port, the node that the first group sees in its stead.
        hubs: nodes outside that every group is linked to in the same way.
    """

    instances: tuple[tuple[int, ...], ...]
    ports: tuple[int, ...]
    before: tuple[int, ...]
    hubs: tuple[int, ...]

    @property
    def last_ports(self) -> tuple[int, ...]:
        """Nodes at the ports of the last group."""
        return tuple(self.instances[-1][p] for p in self.ports)

    def before_of(self, k: int) -> tuple[int, ...]:
        """The nodes that group `k` sees of what is before it."""
        if k == 0:
            return self.before
        return tuple(self.instances[k - 1][p] for p in self.ports)


def find_runs(problem: Problem) -> tuple[Run, ...]:
    """The runs that the problem's hints lead to; hints that do not hold are passed over."""
    links = _Links(problem)
    runs: list[Run] = []
    taken: set[int] = set()
    for repeat in problem.repeats:
        nodes = [v for instance in repeat.instances for v in instance]
        if len(set(nodes)) < len(nodes) or taken & set(nodes):
            continue
        found = list(_runs(links, repeat.instances))
        runs.extend(found)
        taken.update(v for run in found for instance in run.instances for v in instance)
    return tuple(runs)


def independent_runs(problem: Problem) -> tuple[Run, ...]:
    """The runs that see of each other nothing but the ports of a last group."""
    runs = find_runs(problem)
    gone = {v for run in runs for instance in run.instances for v in instance}
    gone -= {v for run in runs for v in run.last_ports}
    return tuple(run for run in runs if gone.isdisjoint((*run.before, *run.hubs)))


class _Links:
    """A problem's nodes and edges by content."""

    def __init__(self, problem: Problem) -> None:
        self.nodes = problem.nodes
        self.edges = problem.edges
        self._digests: dict[int, bytes] = {}
        self.around: list[list[tuple[int, LinkKey]]] = [[] for _ in problem.nodes]
        for edge in problem.edges:
            content = (self._of(edge.prices), self._of(edge.rows), self._of(edge.cols))
            self.around[edge.source].append((edge.target, (True, *content)))
            self.around[edge.target].append((edge.source, (False, *content)))

    def node(self, v: int) -> tuple[bytes, bytes]:
        """Content of a node, whenever it is alive."""
        node: Node = self.nodes[v]
        return self._of(node.cost), self._of(node.usage)

    def _of(self, array: FloatArray | IntArray | Closure) -> bytes:
        # Arrays that are shared are digested once.
        key = id(array)
        if key not in self._digests:
            parts = array.arcs if isinstance(array, Closure) else (array,)
            content = (part.tobytes() for part in parts)
            self._digests[key] = fingerprint(repr(array.shape).encode(), *content)
        return self._digests[key]


@dataclass(frozen=True)
class _Instance:
    """One group's links: inside, to the group before, to nodes outside."""

    inside: Counter[tuple[int, int, LinkKey]]
    back: Counter[tuple[int, int, LinkKey]]
    outside: Counter[tuple[int, int, LinkKey]]
    contents: tuple[object, ...]
    neighbours_only: bool


def _runs(links: _Links, instances: Sequence[Sequence[int]]) -> Iterator[Run]:
    place = {v: (k, p) for k, nodes in enumerate(instances) for p, v in enumerate(nodes)}
    read = [_read(links, k, nodes, place) for k, nodes in enumerate(instances)]
    begin = 0
    for end in range(1, len(read) + 1):
        if end < len(read) and _alike(read[end - 1], read[end], first=end - 1 == begin):
            continue
        run = _run(instances[begin:end], read[begin:end])
        if run is not None:
            yield run
        begin = end


def _read(
    links: _Links, k: int, nodes: Sequence[int], place: Mapping[int, tuple[int, int]]
) -> _Instance:
    inside: Counter[tuple[int, int, LinkKey]] = Counter()
    back: Counter[tuple[int, int, LinkKey]] = Counter()
    outside: Counter[tuple[int, int, LinkKey]] = Counter()
    near = True
    for p, v in enumerate(nodes):
        for w, key in links.around[v]:
            other, q = place.get(w, (None, w))
            if other is None:
                outside[p, w, key] += 1
            elif other == k:
                inside[p, q, key] += 1
            elif other == k - 1:
                back[p, q, key] += 1
            else:
                near = near and other == k + 1
    return _Instance(inside, back, outside, tuple(links.node(v) for v in nodes), near)


def _alike(one: _Instance, other: _Instance, *, first: bool) -> bool:
    if one.contents != other.contents or one.inside != other.inside:
        return False
    return one.neighbours_only and other.neighbours_only and (first or one.back == other.back)


def _run(instances: Sequence[Sequence[int]], read: Sequence[_Instance]) -> Run | None:
    """The run of groups that are alike inside, if their links outside are those of a run."""
    if len(instances) <= 1 or not read[1].back:
        return None
    hubs = read[0].outside
    for instance in read[1:]:
        hubs = hubs & instance.outside
    ports = sorted({q for _, q, _ in read[1].back})
    rest = [instance.outside - hubs for instance in read]
    hub_nodes = {w for _, w, _ in hubs}
    if any(rest[1:-1]) or any(p not in ports or w in hub_nodes for p, w, _ in rest[-1]):
        return None
    before = _before(read[1], rest[0])
    if before is None:
        # The first group is linked otherwise to what is before it, so it is only the start.
        stand_ins = tuple(instances[0][q] for q in ports)
        instances = instances[1:]
    else:
        stand_ins = tuple(before[q] for q in ports)
    if len(instances) <= 1 or hub_nodes & set(stand_ins) or len(set(stand_ins)) < len(ports):
        return None
    return Run(tuple(map(tuple, instances)), tuple(ports), stand_ins, tuple(sorted(hub_nodes)))


def _before(second: _Instance, rest: Counter[tuple[int, int, LinkKey]]) -> dict[int, int] | None:
    """For each port, the node outside that the first group is linked to as to that port."""
    wanted: dict[tuple[int, LinkKey], list[int]] = {}
    for p, q, key in second.back.elements():
        wanted.setdefault((p, key), []).append(q)
    found: dict[int, int] = {}
    for p, w, key in rest.elements():
        places = wanted.get((p, key))
        if not places:
            return None
        q = places.pop()
        if found.setdefault(q, w) != w:
            return None
    return None if any(wanted.values()) else found


def covered_edges(problem: Problem, runs: Sequence[Run]) -> list[Edge]:
    """The edges that no run accounts for: between nodes that stay when runs are condensed."""
    gone = {v for run in runs for instance in run.instances[:-1] for v in instance}
    gone |= {v for run in runs for v in run.instances[-1]} - {
        v for run in runs for v in run.last_ports
    }
    kept = [e for e in problem.edges if e.source not in gone and e.target not in gone]
    return [e for e in kept if not any(_accounted(e, run) for run in runs)]


def _accounted(edge: Edge, run: Run) -> bool:
    """Whether an edge between staying nodes is part of a run's own prices."""
    ports = set(run.last_ports)
    known = ports | set(run.hubs)
    ends = {edge.source, edge.target}
    return ends <= known and bool(ends & ports)
