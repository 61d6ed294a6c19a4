"""How the operators of a program are executed: fused by a compiler, or multiplied in float8."""

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from autoshard.costs import Category, Execution, categorise
from autoshard.errors import OptionError
from autoshard.graph import DType, Graph, Node, layer_path, module_paths
from autoshard.graph.experts import COMBINE
from autoshard.lowering.recompute import Saving, saved_for
from autoshard.mesh import Device
from autoshard.ops import call_of, is_fusible, is_view, rule_for, saves_less_compiled, weights_of
from autoshard.plan.options import PlanOptions

FLOAT8 = DType.FLOAT8_E4M3FN
"""Element type of products in float8."""

_CAST = "aten.to.dtype"
_HALF = (DType.BFLOAT16, DType.FLOAT16)
_WEIGHTS = frozenset({2})
"""Position of the weights of `autoshard.combine`."""


def executions(graph: Graph, options: PlanOptions) -> tuple[Execution, ...]:
    """How each node of a program is executed."""
    compiled = options.runtime.execution == "compile"
    known: dict[Execution, Execution] = {}
    numbers = range(len(graph.nodes))
    in_eager = [is_in_modules(node, options.runtime.eager_modules) for node in graph.nodes]
    fusion = _Fusion(graph, in_eager) if compiled else None
    in_float8 = _in_float8(graph, options.runtime.float8_modules)
    weight_casts = (
        1 / options.training.micro_batches if options.runtime.float8_weights_once else 1.0
    )
    found = []
    for i in numbers:
        execution = Execution(
            is_compiled=compiled and not in_eager[i],
            launches=fusion is None or fusion.launches(i),
            unread=fusion.unread[i] if fusion else frozenset(),
            unwritten=fusion.unwritten[i] if fusion else frozenset(),
            computed_again=fusion.computed_again[i] if fusion else frozenset(),
            in_float8=i in in_float8,
            weight_casts=weight_casts,
            expert_launch=options.runtime.expert_launch if _is_grouped(graph.nodes[i]) else 0.0,
            balanced=options.runtime.balanced_attention,
        )
        found.append(known.setdefault(execution, execution))
    return tuple(found)


def saving_of(graph: Graph, executed: Sequence[Execution], options: PlanOptions) -> Saving:
    """How the tensors that a program saves for backward differ from those of eager mode."""
    pairs = list(zip(graph.nodes, executed, strict=True))
    again = frozenset(node.outputs[i] for node, x in pairs for i in x.computed_again)
    combining = [n.name for n in graph.nodes if n.operator == COMBINE]
    for_free = dict.fromkeys(combining if options.runtime.weighted_activations else (), _WEIGHTS)
    narrow = [node for node, x in pairs if options.runtime.float8_saved_inputs and x.in_float8]
    weights = weights_of(graph) if narrow else {}
    in_float8 = {
        node.name: frozenset(
            i
            for i, value in enumerate(node.inputs)
            if value not in weights and graph.values[value].dtype in _HALF
        )
        for node in narrow
    }
    losses = [node for node, x in pairs if x.is_compiled and saves_less_compiled(node.operator)]
    scores = [_FusedScores.of(graph, node, executed) for node in losses]
    chain = frozenset(value for found in scores for value in found.values)
    return Saving(
        again | chain,
        in_float8,
        for_free,
        compiled=frozenset(found.reader for found in scores),
        casts=frozenset(found.cast for found in scores if found.cast),
        unwritten=chain,
    )


def _is_grouped(node: Node) -> bool:
    """True for products of the tokens of each expert with its weight."""
    return "grouped_mm" in node.operator


def check_float8(options: PlanOptions, device: Device) -> None:
    """Raise OptionError if products in float8 are asked for, but the device has none."""
    if options.runtime.float8_modules and FLOAT8 not in device.peak_flops:
        raise OptionError(f"float8_modules: {device.name} has no peak_flops of {FLOAT8}")


def is_in_modules(node: Node, modules: Sequence[str]) -> bool:
    """True if a node is in one of the modules with these dotted paths or patterns."""
    paths = module_paths(node.module) if modules else ()
    return any(fnmatchcase(path, name) for path in paths for name in modules)


def _in_float8(graph: Graph, modules: Sequence[str]) -> frozenset[int]:
    """The products of a 16-bit weight and an activation, in modules with one of these names."""
    if not modules:
        return frozenset()
    weights = weights_of(graph)
    found = set()
    for i, node in enumerate(graph.nodes):
        if not is_in_modules(node, modules):
            continue
        call = call_of(graph, node)
        is_weight = [v in weights for v in node.inputs if len(graph.values[v].shape) > 1]
        if categorise(rule_for(call), call.inputs, is_view=is_view(node.operator)) is not (
            Category.CONTRACTION
        ):
            continue
        halves = [t.dtype in _HALF for t in call.inputs if t.dtype.is_differentiable]
        if any(is_weight) and not all(is_weight) and all(halves):
            found.add(i)
    return frozenset(found)


class _FusedScores(NamedTuple):
    """A loss whose kernels also convert its scores to a wider type, if they are converted.

    Attributes:
        reader: name of the loss.
        cast: name of the cast; empty if there is none.
        values: what it makes, and the views of it up to the loss.
    """

    reader: str
    cast: str = ""
    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: Graph, loss: Node, executed: Sequence[Execution]) -> "_FusedScores":
        """Follow the scores of a loss back to their cast."""
        returned = {output.name for output in graph.outputs}
        # Back as far as nothing else reads a value, which therefore never has to be in memory.
        values: list[str] = []
        value = loss.inputs[0]
        while len(graph.consumers[value]) == 1 and value not in returned and value in graph.makers:
            number = graph.makers[value]
            maker = graph.nodes[number]
            values.append(value)
            if maker.operator == _CAST and executed[number].is_compiled:
                before, after = (graph.values[v].dtype for v in (maker.inputs[0], value))
                if before.itemsize < after.itemsize and before.is_differentiable:
                    return cls(loss.name, maker.name, tuple(values))
            if not is_view(maker.operator):
                break
            value = maker.inputs[0]
        return cls(loss.name)


class _Fusion:
    """Operators that a compiler fuses into one kernel.

    Pointwise operators, normalisations and reductions are fused with those that read them, through
    views, as TorchInductor does. Of two operators that have equally many products and other kernels
    before them on the longest path, neither waits for a kernel that waits for the other, so a group
    of connected ones is one kernel. Groups do not cross the boundaries of layers (numbered
    modules), so that equal layers are fused in the same way, as if each layer were compiled.

    Args:
        graph: the program.
        in_eager: for each node, True if it runs by itself.

    Attributes:
        unread: for each node, the inputs that its kernel has made or read already.
        unwritten: for each node, the outputs that only its kernel reads.
        computed_again: for each node, those of them that backward can compute again from tensors
            that are kept in any case, as min-cut partitioning of torch.compile has it.
    """

    def __init__(self, graph: Graph, in_eager: Sequence[bool]) -> None:
        self._graph = graph
        self._in_eager = in_eager
        self._roots = list(range(len(graph.nodes)))
        self._made_by: dict[str, int] = {}
        self._source: dict[str, str] = {}
        self._readers: dict[str, list[int]] = defaultdict(list)
        self._connect()
        self._members: dict[int, list[int]] = defaultdict(list)
        for i in range(len(graph.nodes)):
            self._members[self._root(i)].append(i)
        self.unread = self._unread()
        self.unwritten = self._unwritten()
        self.computed_again = self._computed_again()

    def launches(self, number: int) -> bool:
        """True if a kernel ends with a node."""
        return number == self._members[self._root(number)][-1]

    def _connect(self) -> None:
        graph = self._graph
        levels: dict[str, int] = {}
        for i, node in enumerate(graph.nodes):
            level = max((levels.get(v, 0) for v in node.inputs), default=0)
            if is_view(node.operator):
                origin = self._source.get(node.inputs[0], node.inputs[0]) if node.inputs else ""
                self._source.update(dict.fromkeys(node.outputs, origin))
            else:
                is_fused = self._is_fusible(node) and not self._in_eager[i]
                for value in dict.fromkeys(self._source.get(v, v) for v in node.inputs):
                    self._readers[value].append(i)
                    maker = self._made_by.get(value)
                    if maker is None or not is_fused or levels.get(value) != level:
                        continue
                    if layer_path(graph.nodes[maker].module) == layer_path(node.module):
                        self._roots[self._root(i)] = self._root(maker)
                if is_fused:
                    self._made_by.update(dict.fromkeys(node.outputs, i))
                level += not is_fused
            levels.update(dict.fromkeys(node.outputs, level))

    def _is_fusible(self, node: Node) -> bool:
        inputs = (self._graph.values[v] for v in node.inputs)
        return is_fusible(node.operator) and any(t.dtype.is_differentiable for t in inputs)

    def _root(self, number: int) -> int:
        while self._roots[number] != number:
            self._roots[number] = self._roots[self._roots[number]]
            number = self._roots[number]
        return number

    def _unread(self) -> list[frozenset[int]]:
        graph, seen = self._graph, set[tuple[int, str]]()
        found = []
        for i, node in enumerate(graph.nodes):
            root = self._root(i)
            values = [self._source.get(v, v) for v in node.inputs]
            found.append(frozenset(p for p, v in enumerate(values) if (root, v) in seen))
            seen.update((root, v) for v in (*values, *node.outputs))
        return found

    def _unwritten(self) -> list[frozenset[int]]:
        graph = self._graph
        returned = {self._source.get(o.name, o.name) for o in graph.outputs if o.name is not None}
        found = []
        for i, node in enumerate(graph.nodes):
            root = self._root(i)
            inside = (
                p
                for p, value in enumerate(node.outputs)
                if value not in returned and self._read_within(value, root)
            )
            found.append(frozenset(inside))
        return found

    def _computed_again(self) -> list[frozenset[int]]:
        graph = self._graph
        kept = {i.name for i in graph.inputs}
        for node in graph.nodes:
            saved = saved_for(graph, node)
            kept.update(self._source.get(v, v) for v in (node.inputs[p] for p in saved.inputs))
            kept.update(node.outputs[p] for p in saved.outputs)
        found, again = [], set[str]()
        for node, unwritten in zip(graph.nodes, self.unwritten, strict=True):
            sources = {self._source.get(v, v) for v in node.inputs}
            own: frozenset[int] = frozenset()
            if is_view(node.operator):
                if not sources.isdisjoint(again):
                    own = frozenset(range(len(node.outputs)))
            elif all(source in kept or source in again for source in sources):
                own = unwritten
            again.update(node.outputs[p] for p in own)
            found.append(own)
        return found

    def _read_within(self, value: str, root: int) -> bool:
        readers = self._readers.get(value, ())
        return bool(readers) and all(self._root(i) == root for i in readers)
