"""Cuts into pipeline stages that make the largest stage as small as possible."""

from collections.abc import Hashable, Sequence

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.errors import OptionError
from autoshard.graph import InputKind, StageCutter
from autoshard.mesh import Mesh
from autoshard.ops import call_of, rule_for
from autoshard.plan.options import PlanOptions, Weight
from autoshard.pricing.prices import Prices

_ROUNDING = 1e-9
"""Relative difference of sums of weights that are considered equal."""


def node_weights(
    cutter: StageCutter, weight: Weight, mesh: Mesh, options: PlanOptions
) -> FloatArray:
    """The weight of every node, shape [nodes]; the weight of a stage is the sum over its nodes.

    Nodes that are copied into stages weigh nothing. A parameter counts once, in the first stage
    that uses it.

    Args:
        cutter: the program.
        weight: what is counted.
        mesh: the devices, for `time`.
        options: mode, for `time`.
    """
    if weight in ("parameters", "bytes"):
        return _state_weights(cutter, in_bytes=weight == "bytes")
    graph = cutter.graph
    prices = Prices(graph, mesh, options)
    known: dict[Hashable, float] = {}
    found = np.zeros(len(graph.nodes))
    for i in cutter.placed:
        node = graph.nodes[i]
        key = prices.kind(node), prices.gradients.flows(node)
        if key not in known:
            rule = rule_for(call_of(graph, node))
            if weight == "flops":
                points = float(np.prod([float(size) for size in rule.sizes.values()]))
                known[key] = rule.flops_per_point * points
            else:
                seconds = prices.rank_compute(node, rule.sizes)
                known[key] = seconds.forward + seconds.backward
        found[i] = known[key]
    return found


def _state_weights(cutter: StageCutter, *, in_bytes: bool) -> FloatArray:
    """Number of elements, or bytes, of the parameters that each placed node is the first to need.

    Bytes include buffers and constants.
    """
    graph = cutter.graph
    kinds = {InputKind.PARAMETER}
    if in_bytes:
        kinds |= {InputKind.BUFFER, InputKind.CONSTANT, InputKind.PREPARED}
    needs: dict[str, frozenset[str]] = {
        i.name: frozenset([i.name]) for i in graph.inputs if i.kind in kinds
    }
    found = np.zeros(len(graph.nodes))
    placed, counted = set(cutter.placed), set[str]()
    for i, node in enumerate(graph.nodes):
        needed = frozenset[str]().union(*(needs.get(value, ()) for value in node.inputs))
        if i not in placed:
            needs.update(dict.fromkeys(node.outputs, needed))
            continue
        tensors = [graph.values[name] for name in needed - counted]
        found[i] = sum(tensor.nbytes if in_bytes else tensor.numel for tensor in tensors)
        counted |= needed
    return found


def balanced_cuts(
    cutter: StageCutter,
    stages: int,
    weights: Sequence[float] | FloatArray,
    *,
    required: Sequence[int] = (),
) -> tuple[int, ...]:
    """The cuts that make the largest stage as small as possible.

    Of several such cuts, those with the fewest bytes that cross them, then those with the least sum
    of squares of the weights of stages.

    Args:
        cutter: the program.
        stages: number of stages, which the result has exactly.
        weights: the weight of each node; those of nodes that are copied do not count.
        required: nodes of cut points that must be among the cuts.

    Raises:
        OptionError: the program has fewer places to cut, or more cuts are required.
    """
    points = cutter.cut_points
    if not len(required) < stages <= len(points) + 1:
        raise OptionError(
            f"the program can be cut into {len(required) + 1} to {len(points) + 1} stages with the "
            f"cuts that are given, not {stages}"
        )
    placed = np.array(cutter.placed, dtype=np.intp)
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=float)[placed])))
    nodes = np.array([0, *(point.node for point in points), len(cutter.graph.nodes)], dtype=np.intp)
    ends = sums[np.searchsorted(placed, nodes)]
    pinned = np.isin(nodes, np.array(required, dtype=np.intp))
    # The first range of a stage that ends at [j] is at least that of the last required cut before.
    lows = np.concatenate(
        ([0], np.maximum.accumulate(np.where(pinned, np.arange(len(nodes)), 0))[:-1])
    )
    limit = _least_maximum(ends, lows, stages) * (1 + _ROUNDING)
    nbytes = np.array([0, *(point.nbytes for point in points), 0], dtype=float)
    chosen = _fewest_bytes(ends, lows, nbytes, stages, limit)
    return tuple(int(nodes[i]) for i in chosen)


def _least_maximum(ends: FloatArray, lows: IntArray, stages: int) -> float:
    """The least possible weight of the largest stage.

    Args:
        ends: sum of weights before each place, shape [places]; the first and the last are those of
            the program.
        lows: the first place where a stage that ends at each place may begin, shape [places].
        stages: number of stages.
    """
    places = np.arange(len(ends))
    best = np.where(lows == 0, ends - ends[0], np.inf)
    best[0] = np.inf
    for stage in range(1, stages):
        # The maximum of a term that ascends with the place of the cut and one that descends is
        # least where they cross.
        first = np.maximum(lows, stage)
        crossing = np.searchsorted(best[stage:] + ends[stage:], ends) + stage
        found = np.full(len(ends), np.inf)
        for shift in (0, -1):
            cut = np.clip(crossing + shift, first, places - 1)
            is_valid = (cut >= first) & (cut < places)
            cut = np.where(is_valid, cut, 0)
            value = np.maximum(best[cut], ends - ends[cut])
            found = np.minimum(found, np.where(is_valid, value, np.inf))
        best = found
    return float(best[-1])


def _fewest_bytes(
    ends: FloatArray, lows: IntArray, nbytes: FloatArray, stages: int, limit: float
) -> list[int]:
    """The places of the cuts with the fewest bytes, so that no stage weighs more than a limit."""
    num_places = len(ends)
    # A dynamic program over the places of the last cut, stages x places^2: cuts are compared by
    # bytes, and only among equals by squares, so one pass per stage has both.
    first = np.maximum(lows, np.searchsorted(ends, ends - limit))
    crossing = np.where(first == 0, 0.0, np.inf)
    crossing[0] = np.inf
    squares = (ends - ends[0]) ** 2
    parents: list[IntArray] = []
    for stage in range(1, stages):
        more, wider = np.full(num_places, np.inf), np.full(num_places, np.inf)
        parent = np.zeros(num_places, dtype=np.intp)
        for end in range(stage + 1, num_places - (stages - 1 - stage)):
            low = max(int(first[end]), stage)
            total = crossing[low:end] + nbytes[low:end]
            if not total.size or not np.isfinite(least := total.min()):
                continue
            cuts = low + np.flatnonzero(total == least)
            sizes = squares[cuts] + (ends[end] - ends[cuts]) ** 2
            chosen = int(sizes.argmin())
            more[end], wider[end], parent[end] = least, sizes[chosen], cuts[chosen]
        crossing, squares = more, wider
        parents.append(parent)
    cuts_found, end = list[int](), num_places - 1
    for parent in reversed(parents):
        end = int(parent[end])
        cuts_found.append(end)
    return cuts_found[::-1]
