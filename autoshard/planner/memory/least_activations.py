"""The activations that are in memory between forward and backward in every plan.

What autograd saves outside of the units of activation checkpointing is kept in any case. Of each
unit, either what enters it is kept, if it is checkpointed, or what autograd saves inside. Values
that may be views of each other count once, and values made from parameters alone do not count.
"""

from collections.abc import Callable, Iterator, Mapping

from autoshard.graph import Graph, InputKind, Node, find_blocks
from autoshard.graph.gradients import Gradients
from autoshard.lowering.recompute import (
    Keeps,
    Saving,
    checkpoint_units,
    recomputed_part,
    saved_for,
)
from autoshard.ops import SavedByAutograd, may_be_view
from autoshard.plan.options import PlanOptions
from autoshard.pricing.execution import executions, saving_of

_Storages = Mapping[str, tuple[str, int]]
_BATCH = frozenset({InputKind.USER, InputKind.RECEIVED})


def least_activations(graph: Graph, options: PlanOptions) -> int:
    """Bytes that all devices together keep of the activations of a micro-batch, at least.

    Args:
        graph: the program.
        options: of a plan in training.
    """
    saving = saving_of(graph, executions(graph, options), options)
    saved, storages = _saved_for_all(graph, saving), _storages(graph)
    units: tuple[range, ...] = ()
    if options.memory.activation_checkpointing != "never":
        units = checkpoint_units(graph, find_blocks(graph), options.memory.checkpointed_modules)

    def bytes_of(values: Iterator[str]) -> dict[str, int]:
        """Least bytes of the storages of some values."""
        found: dict[str, int] = {}
        for storage, nbytes in map(storages.__getitem__, values):
            found[storage] = max(found.get(storage, 0), nbytes)
        return found

    in_units = {i for unit in units for i in unit}
    outside = bytes_of(_kept_outside(graph, in_units, saved))
    counted = set(outside)
    total = sum(outside.values())
    for unit in units:
        entering, inside = (
            {storage: n for storage, n in bytes_of(values).items() if storage not in counted}
            for values in (_entering(graph, unit, saved), _saved_by(graph, unit, saved))
        )
        total += min(sum(entering.values()), sum(inside.values()))
        counted |= entering.keys() | inside.keys()
    # Any of them may be saved in float8.
    return total // 2 if saving.in_float8 else total


def _saved_for_all(graph: Graph, saving: Saving) -> Callable[[int], SavedByAutograd]:
    """The tensors that are saved for a node, by its number."""
    gradients = Gradients(graph, training=True)
    known: dict[tuple[int, tuple[bool, bool, bool]], SavedByAutograd] = {}

    def saved(number: int) -> SavedByAutograd:
        node, kind = graph.nodes[number], graph.kinds[number]
        if not gradients.flows(node):
            return SavedByAutograd()
        if not saving.computed_again.isdisjoint((*node.inputs, *node.outputs)):
            return saved_for(graph, node, saving)
        key = kind, saving.cache_key(node)
        if key not in known:
            known[key] = saved_for(graph, node, saving)
        return known[key]

    return saved


def _storages(graph: Graph) -> _Storages:
    """The first value whose memory each value may share, and the bytes that it uses of it at least.

    The bytes are 0 if nothing is known, and for inputs of the program and what they alone make.
    """
    found = {i.name: (i.name, 0) for i in graph.inputs}
    from_batch = {i.name for i in graph.inputs if i.kind in _BATCH}
    for node in graph.nodes:
        if not from_batch.isdisjoint(node.inputs):
            from_batch.update(node.outputs)
        for value in node.outputs:
            nbytes = graph.values[value].nbytes if value in from_batch else 0
            found[value] = value, nbytes
            if node.inputs and may_be_view(node.operator):
                found[value] = _viewed(graph, node, nbytes, found)
    return found


def _viewed(graph: Graph, node: Node, nbytes: int, storages: _Storages) -> tuple[str, int]:
    storage, least = storages[node.inputs[0]]
    is_expanded = nbytes > graph.values[node.inputs[0]].nbytes
    return storage, 0 if is_expanded else min(least, nbytes)


def _kept_outside(
    graph: Graph, in_units: set[int], saved: Callable[[int], SavedByAutograd]
) -> Iterator[str]:
    """Outputs of the program, and what nodes outside of units save."""
    for output in graph.outputs:
        if output.name is not None and output.updates is None:
            yield output.name
    for i in range(len(graph.nodes)):
        if i not in in_units:
            yield from _saved_by(graph, range(i, i + 1), saved)


def _saved_by(graph: Graph, nodes: range, saved: Callable[[int], SavedByAutograd]) -> Iterator[str]:
    for i in nodes:
        node = graph.nodes[i]
        yield from (node.inputs[position] for position in saved(i).inputs)
        yield from (node.outputs[position] for position in saved(i).outputs)


def _entering(graph: Graph, unit: range, saved: Callable[[int], SavedByAutograd]) -> Iterator[str]:
    """Values made before a unit that it reads again, if it is checkpointed."""
    reading, _ = recomputed_part(unit, lambda i: Keeps.of(saved(i)))
    for i in reading:
        values = graph.nodes[i].inputs
        yield from (value for value in values if graph.makers.get(value, -1) < unit.start)
