"""Cuts into pipeline stages by name: before or after modules, at marks in forward, by layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate, zip_longest

from autoshard.errors import OptionError
from autoshard.graph import Graph, StageCutter, find_blocks, layer_path, module_paths


def named_cuts(cutter: StageCutter, names: Sequence[str]) -> tuple[int, ...]:
    """The cuts that `PlanOptions.cuts` asks for.

    A pattern stands for all modules that match and are not inside another one that does. Where it
    asks for a cut before the first or after the last operator of the program, there is none.

    Args:
        cutter: the program.
        names: `before:MODULE`, `after:MODULE` or `at:OPERATOR`.

    Returns:
        Nodes of cut points, ascending.

    Raises:
        OptionError: there is no such name, or the program cannot be cut there.
    """
    if not names:
        return ()
    begin = cutter.placed[0] if cutter.placed else len(cutter.graph.nodes)
    spans = _module_spans(cutter)
    found: set[int] = set()
    for text in names:
        place, _, name = text.partition(":")
        if place == "at":
            found.add(_cut_point(cutter, _number(cutter.graph, name, text), text))
            continue
        matching = _matching(spans, name, text)
        for span in matching:
            node = span.first if place == "before" else span.after
            if node is not None and node > begin:
                found.add(_cut_point(cutter, node, text))
            elif len(matching) == 1:
                raise OptionError(f"cut {text!r}: the program has no operator {place} it")
    return tuple(sorted(found))


def marked_cuts(cutter: StageCutter) -> tuple[int, ...]:
    """The cuts where forward calls `torch.distributed.pipelining.pipe_split()`.

    Calls before the first or after the last operator of the program make no cut.

    Raises:
        OptionError: the program cannot be cut at a call.
    """
    nodes = cutter.graph.nodes
    if len({node.part for node in nodes}) <= 1:
        return ()
    placed, found = cutter.placed, set[int]()
    part = nodes[placed[0]].part if placed else 0
    for i in placed:
        if nodes[i].part > part:
            part = nodes[i].part
            found.add(_cut_point(cutter, i, "call of pipe_split()"))
    return tuple(sorted(found))


def cut_names(graph: Graph, cuts: Sequence[int]) -> tuple[str, ...]:
    """Names of cuts, for `PlanOptions.cuts`.

    Args:
        graph: the program.
        cuts: index of the first node of each stage but the first.

    Raises:
        OptionError: an index is not one of a node.

    Example:
        >>> PlanOptions(stages=4, cuts=cut_names(graph, my_policy(graph)))
    """
    for cut in cuts:
        if not 0 < cut < len(graph.nodes):
            raise OptionError(
                f"cut {cut} is not the index of a node: from 1 to {len(graph.nodes) - 1}"
            )
    return tuple(f"at:{graph.nodes[cut].name}" for cut in cuts)


@dataclass(frozen=True, slots=True)
class _Span:
    """The placed nodes of a module: its first one, and the first one after its last one."""

    first: int
    after: int | None


def _module_spans(cutter: StageCutter) -> Mapping[str, _Span]:
    """Spans of all modules that have placed nodes, by path."""
    spans: dict[str, _Span] = {}
    for node, after in zip_longest(cutter.placed, cutter.placed[1:]):
        for path in module_paths(cutter.graph.nodes[node].module):
            first = spans[path].first if path in spans else node
            spans[path] = _Span(first, after)
    return spans


def _matching(spans: Mapping[str, _Span], name: str, text: str) -> Sequence[_Span]:
    """The spans of the outermost modules that a name matches."""
    matching = {path for path in spans if fnmatchcase(path, name)}
    if not matching:
        raise OptionError(
            f"cut {text!r}: the program has no such module with operators that depend on inputs "
            f"and parameters{_similar(name, spans)}"
        )
    return [spans[path] for path in matching if matching.isdisjoint([*module_paths(path)][:-1])]


def _number(graph: Graph, name: str, text: str) -> int:
    """Index of the operator with a name."""
    if name not in graph.numbers:
        similar = _similar(name, graph.numbers)
        raise OptionError(f"cut {text!r}: the program has no such operator{similar}")
    return graph.numbers[name]


def _similar(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=3)
    return f"; similar names: {', '.join(close)}" if close else ""


def _cut_point(cutter: StageCutter, node: int, what: str) -> int:
    point = cutter.cut_point(node)
    if point is None:
        raise OptionError(
            f"{what}: a cut there leaves a stage without operators, or separates the reads and the "
            f"update of a buffer; cut elsewhere"
        )
    return point.node


def layer_cuts(cutter: StageCutter, balance: Sequence[int]) -> tuple[int, ...]:
    """The cuts that give each stage a number of layers.

    Layers are the modules with a number as the last part of their path, such as the children of a
    `Sequential`, that are not inside another one; if there are none, the repeated blocks. What
    comes before the first layer belongs to the first stage, what comes after the last to the last
    stage.

    Args:
        cutter: the program.
        balance: number of layers of each stage.

    Raises:
        OptionError: the numbers do not sum to that of the layers, or a stage would have no
            operator.
    """
    layers = _layers(cutter)
    if not layers:
        raise OptionError(
            "balance: the program has neither numbered modules nor repeated blocks; give cuts by "
            "the names of modules"
        )
    if sum(balance) != len(layers):
        raise OptionError(
            f"balance {list(balance)} sums to {sum(balance)}, but the program has {len(layers)} "
            f"layers, from {layers[0].name} to {layers[-1].name}"
        )
    found: list[int] = []
    for number in accumulate(balance[:-1]):
        begins = (layer.first for layer in layers[number:] if layer.first is not None)
        first = next(begins, None)
        point = cutter.cut_point(first) if first is not None else None
        if point is None or point.node in found:
            raise OptionError(
                f"balance {list(balance)}: stage {len(found)} or {len(found) + 1} would have no "
                f"operator that depends on inputs and parameters; cut elsewhere"
            )
        found.append(point.node)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and its first placed node; None if it has none."""

    name: str
    first: int | None


def _layers(cutter: StageCutter) -> Sequence[_Layer]:
    """The layers in program order."""
    begins: dict[str, dict[int, int]] = {}
    for node in cutter.placed:
        path = layer_path(cutter.graph.nodes[node].module)
        if path:
            container, _, name = path.rpartition(".")
            begins.setdefault(container, {}).setdefault(int(name), node)
    if not begins:
        return _repetitions(cutter)
    found: list[tuple[int, _Layer]] = []
    for container, numbers in begins.items():
        place = min(numbers.values())
        for number in range(max(numbers) + 1):
            place = numbers.get(number, place)
            name = f"{container}.{number}".lstrip(".")
            found.append((place, _Layer(name, numbers.get(number))))
    return [layer for _, layer in sorted(found, key=lambda pair: pair[0])]


def _repetitions(cutter: StageCutter) -> Sequence[_Layer]:
    placed = set(cutter.placed)
    return [
        _Layer(cutter.graph.nodes[nodes.start].name, next((i for i in nodes if i in placed), None))
        for block in find_blocks(cutter.graph)
        for nodes in block.instances()
    ]
