"""Cutting a program into consecutive pipeline stages.

A stage is a program of its own. Values go only from a stage to the next one: a value that a later
stage uses is received and sent on by the stages between. User inputs are not sent, since every rank
has the arguments of a call. Results of forward leave from the last stage.

A node is *placed* if it derives from both user inputs and parameters (in a model without
parameters, from user inputs), or must run once, such as one that draws random numbers; cuts divide
the placed nodes. Other nodes, such as masks, tables of positions and transposed weights, are copied
into every stage that uses them. A parameter that several stages use is an input of each of them.
Reads and updates of a buffer that forward updates belong to one stage.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from autoshard.errors import GraphError
from autoshard.graph.blocks import Block, find_blocks
from autoshard.graph.dependencies import nodes_making
from autoshard.graph.ir import DimFactors, Graph, Input, InputKind, Node, Output

_DATA, _STATE, _PLACED = 1, 2, 4
"""Origins of a value: user inputs, parameters, and placed nodes."""


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place where a new stage may begin.

    Attributes:
        node: index of the first node of the new stage.
        module: dotted path of the module that makes that node.
        values: values that cross the cut, in the order in which they are made.
        nbytes: their bytes.
        layer: number of the instance of a repeated block that begins here; None elsewhere.
    """

    node: int
    module: str
    values: tuple[str, ...]
    nbytes: int
    layer: int | None


class StageCutter:
    """Cuts one program into stages.

    Args:
        graph: the normalised program.
        runs_once: returns True for nodes that must not be copied, such as those that draw random
            numbers.
        dims: gives `Input.dims` of a value that a stage receives.

    Attributes:
        graph: the program.

    Example:
        >>> cutter = StageCutter(graph)
        >>> first, second = cutter.split([cutter.cut_points[3].node])
    """

    def __init__(
        self,
        graph: Graph,
        *,
        runs_once: Callable[[Node], bool] = lambda _: False,
        dims: Callable[[str], tuple[DimFactors, ...]] = lambda _: (),
    ) -> None:
        self.graph = graph
        self._dims = dims
        self._inputs = {i.name: i for i in graph.inputs if i.kind is not InputKind.LITERAL}
        self._runs_once = runs_once

    @cached_property
    def placed(self) -> tuple[int, ...]:
        """Indices of the placed nodes, in order."""
        nodes, derived = self.graph.nodes, self._derivations()
        return tuple(i for i, x in enumerate(nodes) if any(derived[v] & _PLACED for v in x.outputs))

    @cached_property
    def cut_points(self) -> tuple[CutPoint, ...]:
        """All places where a stage may begin, in order, without the beginning of the program.

        Of several places with the same crossing values, the first is kept, and that where a
        repeated block begins.
        """
        found = {point.node: point for point in self._points.values()}
        return tuple(found[node] for node in sorted(found))

    def cut_point(self, node: int) -> CutPoint | None:
        """The cut point that stands for a cut before a node.

        Args:
            node: index of a node; the cut is before the first placed node from there on.

        Returns:
            None if a cut there would leave a stage without placed nodes, or separate reads and
            updates of a buffer.
        """
        number = bisect_left(self.placed, node)
        return self._points.get(self.placed[number]) if number < len(self.placed) else None

    @cached_property
    def _points(self) -> Mapping[int, CutPoint]:
        """The cut point of each placed node before which the program can be cut."""
        graph = self.graph
        starts = {
            nodes.start: number
            for block in self._blocks
            for number, nodes in enumerate(block.instances())
        }
        crossing = dict(self._crossing())
        found: dict[tuple[str, ...], CutPoint] = {}
        previous = dict(zip(self.placed[1:], self.placed, strict=False))
        for node, values in crossing.items():
            instances = range(previous[node] + 1, node + 1)
            layer = next((starts[i] for i in instances if i in starts), None)
            known = found.get(values)
            if known is None or (known.layer is None and layer is not None):
                nbytes = sum(graph.values[value].nbytes for value in values)
                found[values] = CutPoint(node, graph.nodes[node].module, values, nbytes, layer)
        return {node: found[values] for node, values in crossing.items()}

    def _crossing(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Placed nodes before which the program can be cut, and the values that then cross."""
        begins: dict[int, list[str]] = {}
        begin, end = self._lifetimes
        for value, place in begin.items():
            begins.setdefault(place, []).append(value)
        alive: list[str] = []
        for before, node in pairwise(self.placed):
            alive = [v for v in (*alive, *begins.get(before, ())) if end[v] >= node]
            if not any(first < node <= last for first, last in self._updates.values()):
                yield node, tuple(alive)

    def split(self, cuts: Sequence[int]) -> tuple[Graph, ...]:
        """The programs of the stages.

        Args:
            cuts: index of the first node of each stage but the first, ascending.

        Raises:
            GraphError: cuts are not ascending indices of nodes, a stage would have no operator, or
                a cut separates reads and updates of a buffer.
        """
        self.check(cuts)
        last = len(cuts)
        begin, end = self._lifetimes
        spans = {
            value: (bisect_right(cuts, place), bisect_right(cuts, end[value]))
            for value, place in begin.items()
        }
        edges = (0, *cuts, len(self.graph.nodes))
        return tuple(
            self._program(
                [self.graph.nodes[i] for i in self.placed if low <= i < high],
                received=[v for v, (a, b) in spans.items() if a < stage <= b],
                sent=[v for v, (a, b) in spans.items() if a <= stage < b],
                updates=[v for v, (first, _) in self._updates.items() if low <= first < high],
                is_first=stage == 0,
                is_last=stage == last,
            )
            for stage, (low, high) in enumerate(pairwise(edges))
        )

    def _derivations(self) -> Mapping[str, int]:
        graph = self.graph
        needed = _DATA | (_STATE if graph.parameters else 0)
        derived: dict[str, int] = {}
        for name, graph_input in self._inputs.items():
            kind = graph_input.kind
            derived[name] = (
                (_DATA if kind is InputKind.USER else 0)
                | (_STATE if kind is InputKind.PARAMETER else 0)
                | (_PLACED if name in graph.updated else 0)
            )
        for node in graph.nodes:
            found = _PLACED if self._runs_once(node) else 0
            for value in node.inputs:
                found |= derived[value]
            if found & needed == needed:
                found |= _PLACED
            derived.update(dict.fromkeys(node.outputs, found))
        return derived

    @cached_property
    def _lifetimes(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The placed nodes that make a value, and that use it last.

        Only of values that can cross a cut. A result of forward is used after the last node.
        """
        nodes = self.graph.nodes
        begin: dict[str, int] = {}
        end: dict[str, int] = {}
        for i in self.placed:
            for value in nodes[i].inputs:
                if value in begin:
                    end[value] = i
            begin.update(dict.fromkeys(nodes[i].outputs, i))
            end.update(dict.fromkeys(nodes[i].outputs, i))
        for output in self.graph.outputs:
            if output.updates is None and output.name in begin:
                end[output.name] = len(nodes)
        return begin, end

    @cached_property
    def _updates(self) -> Mapping[str, tuple[int, int]]:
        """First and last node that reads or computes each buffer that forward updates.

        A result of forward is read after the last node.
        """
        results = {output.name for output in self.graph.outputs if output.updates is None}
        spans: dict[str, tuple[int, int]] = {}
        for buffer, position in self.graph.updated.items():
            made = self.graph.outputs[position].name
            assert made is not None
            users = [i for i, _ in self.graph.consumers[buffer]]
            if made in self.graph.makers:
                users.append(self.graph.makers[made])
            if buffer in results:
                users.append(len(self.graph.nodes) - 1)
            spans[buffer] = (min(users, default=0), max(users, default=0))
        return spans

    @cached_property
    def _unused(self) -> frozenset[str]:
        """Parameters, buffers and constants that forward does not use; the first stage has them."""
        used = {output.name for output in self.graph.outputs} | set(self.graph.updated)
        return frozenset(
            name
            for name, found in self._inputs.items()
            if found.kind is not InputKind.USER
            and name not in used
            and not self.graph.consumers[name]
        )

    def check(self, cuts: Sequence[int]) -> None:
        """Check that the program can be cut there.

        Raises:
            GraphError: as `split`.
        """
        if not cuts:
            return
        edges = (0, *cuts, len(self.graph.nodes))
        if any(low >= high for low, high in pairwise(edges)):
            raise GraphError(
                f"cuts must be ascending indices of nodes from 1 to {len(self.graph.nodes) - 1}; "
                f"they are {list(cuts)}"
            )
        for stage, (low, high) in enumerate(pairwise(edges)):
            if bisect_right(self.placed, high - 1) == bisect_right(self.placed, low - 1):
                raise GraphError(
                    f"stage {stage} would have no operator that reads both activations and "
                    f"parameters: move its cuts, or ask for fewer stages"
                )
        for buffer, (first, last) in self._updates.items():
            for cut in cuts:
                if first < cut <= last:
                    raise GraphError(
                        f"a cut before node {self.graph.nodes[cut].name!r} separates the reads "
                        f"and the update of buffer {self._inputs[buffer].target!r}: cut elsewhere"
                    )

    def _program(
        self,
        placed: Sequence[Node],
        *,
        received: Sequence[str],
        sent: Sequence[str],
        updates: Collection[str],
        is_first: bool,
        is_last: bool,
    ) -> Graph:
        graph = self.graph
        outputs = [Output(value, sent=True) for value in sent]
        outputs += [o for o in graph.outputs if o.updates is None and is_last]
        outputs += [o for o in graph.outputs if o.updates in updates]
        nodes = self._with_copied(placed, {o.name for o in outputs if o.name}, set(received))
        read = {value for node in nodes for value in node.inputs}
        read |= {o.name for o in outputs if o.name is not None} | set(updates)
        if is_first:
            read |= self._unused
        passed = [i for i in graph.inputs if i.name in read and i.name not in received]
        users = [i for i in passed if i.kind is InputKind.USER]
        inputs = (
            *(i for i in passed if i.kind not in (InputKind.USER, InputKind.LITERAL)),
            *(Input(v, InputKind.RECEIVED, v, dims=self._dims(v)) for v in received),
            *users,
        )
        made = [i.name for i in inputs] + [value for node in nodes for value in node.outputs]
        calls = {graph.call_of(node) for node in nodes} if graph.rules else set()
        return Graph(
            inputs=inputs,
            nodes=tuple(nodes),
            outputs=tuple(outputs),
            values={value: graph.values[value] for value in made},
            out_spec=graph.out_spec if is_last else "",
            rules=tuple(rule for rule in graph.rules if rule.call in calls),
            preparation=self._preparation([i.name for i in inputs if i.kind is InputKind.PREPARED]),
            model=graph.model,
            layers=self._layers(placed, nodes),
        )

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        return find_blocks(self.graph)

    def _layers(self, placed: Sequence[Node], nodes: Sequence[Node]) -> tuple[tuple[int, int], ...]:
        """Indices among the nodes of a stage of the instances that are in it as a whole."""
        numbers = self.graph.numbers
        own = {numbers[node.name] for node in placed}
        order = [numbers[node.name] for node in nodes]
        every = frozenset(self.placed)
        whole = (
            x
            for block in self._blocks
            for x in block.instances()
            if 0 < len(every & {*x}) == len(own & {*x})
        )
        return tuple((bisect_left(order, x.start), bisect_left(order, x.stop)) for x in whole)

    def _with_copied(
        self, placed: Sequence[Node], wanted: Iterable[str], received: Collection[str]
    ) -> list[Node]:
        """The nodes of a stage, with the copied ones that they need, in program order."""
        own = {self.graph.numbers[node.name] for node in placed}
        needed = set(own)
        values = [*wanted, *(value for node in placed for value in node.inputs)]
        while values:
            value = values.pop()
            maker = self.graph.makers.get(value)
            if maker is None or maker in needed or value in received:
                continue
            needed.add(maker)
            values.extend(self.graph.nodes[maker].inputs)
        return [self.graph.nodes[i] for i in sorted(needed)]

    def _preparation(self, names: Sequence[str]) -> Graph | None:
        """The part of the preparation that makes some of its values."""
        whole = self.graph.preparation
        if not names or whole is None:
            return None
        nodes = nodes_making(whole.nodes, names)
        made = (value for node in nodes for value in node.outputs)
        return replace(
            whole,
            nodes=nodes,
            outputs=tuple(map(Output, names)),
            values={value: whole.values[value] for value in made},
        )
