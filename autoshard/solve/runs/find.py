"""Detection of runs: hinted repetitions whose groups have equal prices and links."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.base.memo import kept_in_argument
from autoshard.solve.bounds.path_costs import ShortestPathCost
from autoshard.solve.network import fingerprint
from autoshard.solve.problem import Edge, Problem

_Row = tuple[int, int, int]
"""A link: its position in the group, the position or node at its other end, its key."""


@dataclass(frozen=True)
class Run:
    """Groups of nodes with equal prices and links, each linked to the next.

    Attributes:
        instances: nodes of each group; corresponding nodes have equal positions.
        boundary: positions of the nodes that the next group is linked to.
        before: for each boundary position, the node that the first group is linked to instead.
        shared_nodes: nodes outside of the run that every group is linked to in the same way.
    """

    instances: tuple[tuple[int, ...], ...]
    boundary: tuple[int, ...]
    before: tuple[int, ...]
    shared_nodes: tuple[int, ...]

    @cached_property
    def node_array(self) -> IntArray:
        """The instances as an array, shape [G, P]."""
        return np.array(self.instances, dtype=np.intp)

    @property
    def last_boundary(self) -> tuple[int, ...]:
        """Boundary nodes of the last group."""
        return tuple(self.instances[-1][p] for p in self.boundary)

    def before_of(self, k: int) -> tuple[int, ...]:
        """The boundary nodes of the group before group `k`."""
        if k == 0:
            return self.before
        return tuple(self.instances[k - 1][p] for p in self.boundary)


@kept_in_argument
def find_runs(problem: Problem) -> tuple[Run, ...]:
    """The runs among the problem's hints; wrong hints are ignored."""
    if not problem.repeats:
        return ()
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
    """The runs whose links to other runs end at boundary nodes of their last groups."""
    runs = find_runs(problem)
    inner = {v for run in runs for instance in run.instances for v in instance}
    inner -= {v for run in runs for v in run.last_boundary}
    return tuple(run for run in runs if inner.isdisjoint((*run.before, *run.shared_nodes)))


class _Links:
    """A problem's nodes and edges by content: equal numbers for equal content.

    Every edge is listed once from each of its ends, so there are L = 2 E links.

    Attributes:
        nodes: content of each node without its interval, shape [N].
        at: the node at this end, shape [L].
        others: the node at the other end, shape [L].
        keys: content of the edge and its direction, shape [L].
    """

    def __init__(self, problem: Problem) -> None:
        self._digests: dict[int, bytes] = {}
        numbers: dict[tuple[bytes, ...], int] = {}
        known: dict[tuple[int, ...], int] = {}

        def number(*arrays: FloatArray | IntArray | ShortestPathCost) -> int:
            # Arrays that are shared are digested once.
            identity = tuple(map(id, arrays))
            if identity not in known:
                content = tuple(map(self._digest, arrays))
                known[identity] = numbers.setdefault(content, len(numbers))
            return known[identity]

        ends = np.array([(e.source, e.target) for e in problem.edges], dtype=np.intp).reshape(-1, 2)
        # Twice a number, and one more at the source: an edge seen from its other end is another
        # link.
        keys = [2 * number(e.prices, e.rows, e.cols) for e in problem.edges]
        self.nodes = np.array([number(node.cost, node.usage) for node in problem.nodes])
        self.at = ends.T.ravel()
        self.others = ends[:, ::-1].T.ravel()
        self.keys = np.concatenate((np.array(keys, dtype=np.intp) + 1, keys)).astype(np.intp)

    def _digest(self, array: FloatArray | IntArray | ShortestPathCost) -> bytes:
        key = id(array)
        if key not in self._digests:
            parts = array.steps if isinstance(array, ShortestPathCost) else (array,)
            content = (part.tobytes() for part in parts)
            self._digests[key] = fingerprint(repr(array.shape).encode(), *content)
        return self._digests[key]


@dataclass(frozen=True, eq=False)
class _Instance:
    """Contents and links of one group.

    A link is a row: a position in the group, the other end, the key. The other end is a position
    in this group, the previous or the next one, or a node outside of all groups. Rows are in
    ascending order.

    Attributes:
        contents: of each node, shape [P].
        inside: links inside the group, shape [L, 3].
        back: links to the previous group, shape [L, 3].
        ahead: links to the next group, shape [L, 3].
        outside: links to nodes outside of all groups, shape [L, 3].
        neighbours_only: true if all links to other groups are to the previous and the next one.
    """

    contents: IntArray
    inside: IntArray
    back: IntArray
    ahead: IntArray
    outside: IntArray
    neighbours_only: bool


_KINDS = _OUTSIDE, _INSIDE, _BACK, _AHEAD, _FAR = range(5)


def _runs(links: _Links, instances: Sequence[Sequence[int]]) -> Iterator[Run]:
    read = _read(links, instances)
    begin = 0
    for end in range(1, len(read) + 1):
        if end < len(read) and _alike(read[end - 1], read[end], first=end - 1 == begin):
            continue
        run = _run(instances[begin:end], read[begin:end])
        if run is not None:
            yield run
        begin = end


def _read(links: _Links, instances: Sequence[Sequence[int]]) -> list[_Instance]:
    """The links of each group, in one pass over all edges."""
    group = np.full(len(links.nodes), -1, dtype=np.intp)
    place = np.arange(len(links.nodes))
    for k, nodes in enumerate(instances):
        group[list(nodes)] = k
        place[list(nodes)] = np.arange(len(nodes))
    in_group = group[links.at] >= 0
    at, others, keys = links.at[in_group], links.others[in_group], links.keys[in_group]
    apart = group[others] - group[at]
    kinds = np.select(
        [group[others] < 0, apart == 0, apart == -1, apart == 1],
        [_OUTSIDE, _INSIDE, _BACK, _AHEAD],
        _FAR,
    )
    rows = np.stack((place[at], place[others], keys), axis=1)
    order = np.lexsort((keys, rows[:, 1], rows[:, 0], kinds, group[at]))
    rows, parts = rows[order], (len(_KINDS) * group[at] + kinds)[order]
    starts = np.searchsorted(parts, np.arange(len(_KINDS) * len(instances) + 1)).tolist()
    spans = [rows[first:last] for first, last in pairwise(starts)]
    return [
        _Instance(
            links.nodes[list(nodes)],
            inside=spans[len(_KINDS) * k + _INSIDE],
            back=spans[len(_KINDS) * k + _BACK],
            ahead=spans[len(_KINDS) * k + _AHEAD],
            outside=spans[len(_KINDS) * k + _OUTSIDE],
            neighbours_only=not len(spans[len(_KINDS) * k + _FAR]),
        )
        for k, nodes in enumerate(instances)
    ]


def _alike(one: _Instance, other: _Instance, *, first: bool) -> bool:
    if not (one.neighbours_only and other.neighbours_only):
        return False
    same = np.array_equal(one.contents, other.contents)
    same = same and np.array_equal(one.inside, other.inside)
    # The first group has no group before it, so its links back are compared elsewhere (`_before`).
    return same and (first or np.array_equal(one.back, other.back))


def _run(instances: Sequence[Sequence[int]], read: Sequence[_Instance]) -> Run | None:
    """The run of groups that are equal inside; None if their other links are not those of a run."""
    if len(instances) <= 1 or not len(read[1].back):
        return None
    outside = [Counter(_rows(instance.outside)) for instance in read]
    # Links that every group has in the same way; a counter, since there may be parallel ones.
    shared_nodes = outside[0]
    for links in outside[1:]:
        shared_nodes = shared_nodes & links
    boundary = sorted(set(read[1].back[:, 1].tolist()))
    if not set(read[-1].ahead[:, 0].tolist()) <= {*boundary}:
        # The next group, which is not of this run, is linked to inner nodes of the last one.
        return _run(instances[:-1], read[:-1])
    rest = [links - shared_nodes for links in outside]
    shared = {w for _, w, _ in shared_nodes}
    if any(rest[1:-1]) or any(p not in boundary or w in shared for p, w, _ in rest[-1]):
        return None
    before = None if len(read[0].back) else _before(read[1], rest[0])
    if before is None:
        # The first group has other links to the nodes before it: the run starts after it.
        first_before = tuple(instances[0][q] for q in boundary)
        instances = instances[1:]
    else:
        first_before = tuple(before[q] for q in boundary)
    if len(instances) <= 1 or shared & set(first_before) or len(set(first_before)) < len(boundary):
        return None
    return Run(tuple(map(tuple, instances)), tuple(boundary), first_before, tuple(sorted(shared)))


def _rows(links: IntArray) -> Iterator[_Row]:
    return map(tuple, links.tolist())


def _before(second: _Instance, rest: Counter[_Row]) -> dict[int, int] | None:
    """For each boundary position, the outside node that the first group is linked to instead."""
    wanted: dict[tuple[int, int], list[int]] = {}
    for p, q, key in _rows(second.back):
        wanted.setdefault((p, key), []).append(q)
    found: dict[int, int] = {}
    for p, w, key in rest.elements():
        node_array = wanted.get((p, key))
        if not node_array:
            return None
        q = node_array.pop()
        if found.setdefault(q, w) != w:
            return None
    return None if any(wanted.values()) else found


def group_edges(problem: Problem, run: Run) -> list[Edge]:
    """Edges of a run's second group: inside it, to the previous group, to shared nodes."""
    inside = set(run.instances[1])
    around = inside | set(run.before_of(1)) | set(run.shared_nodes)
    return [
        edge
        for edge in problem.edges
        if {edge.source, edge.target} <= around
        and not inside.isdisjoint((edge.source, edge.target))
    ]


def uncovered_edges(problem: Problem, runs: Sequence[Run]) -> list[Edge]:
    """The edges between nodes that stay after run contraction and that belong to no run."""
    contracted = {v for run in runs for instance in run.instances[:-1] for v in instance}
    contracted |= {v for run in runs for v in run.instances[-1]} - {
        v for run in runs for v in run.last_boundary
    }
    kept = [e for e in problem.edges if e.source not in contracted and e.target not in contracted]
    return [e for e in kept if not any(_accounted(e, run) for run in runs)]


def _accounted(edge: Edge, run: Run) -> bool:
    """True if an edge between nodes that stay is part of a run's table."""
    boundary = set(run.last_boundary)
    known = boundary | set(run.shared_nodes)
    ends = {edge.source, edge.target}
    return ends <= known and bool(ends & boundary)
