"""Programs of models of any depth and batch from exports of a few layers.

Equal layers have equal operators, so a deep program is made of a shallow one by repeating a layer.
Exports have a dynamic number of sequences, so that rows which differ in it share one.
"""

import re
from dataclasses import replace
from functools import lru_cache

from autoshard.graph import Graph, Input, InputKind, Node, Ref, load_graph, resized
from autoshard.graph.normalise.rewriting import rewire
from benchmarks.published.models import Batch, Dimensions, export_decoder

_LAYER = re.compile(r"\blayers\.(\d+)\b")
_EXPORTED = 3
"""Number of exported layers of the kind that is repeated: the first, one between, the last."""
_SEQUENCES = 4
"""Number of sequences of an export."""


def program(dims: Dimensions, batch: Batch, reduce_dtype: str) -> Graph:
    """The program of a model.

    Args:
        dims: of the model.
        batch: what it computes at once.
        reduce_dtype: element type in which gradients are reduced.
    """
    layers = min(dims.layers, dims.dense_layers + _EXPORTED)
    graph = _sized(dims.shortened(layers), batch, reduce_dtype)
    return repeat_layer(graph, layers - 2, dims.layers - layers)


def _sized(dims: Dimensions, batch: Batch, reduce_dtype: str) -> Graph:
    """The program of an export with the number of sequences of a batch."""
    if batch.sequences == 1:  # torch.export makes programs of one sequence that have no others
        return _exported(dims, batch, reduce_dtype)
    graph = _exported(dims, replace(batch, sequences=_SEQUENCES), reduce_dtype)
    if graph.dynamic is None:  # torch.export has fixed the number of sequences
        return _exported(dims, batch, reduce_dtype)
    (size,) = graph.dynamic.symbols
    return replace(resized(graph, {size.name: batch.sequences}), dynamic=None)


@lru_cache(maxsize=4)
def _exported(dims: Dimensions, batch: Batch, reduce_dtype: str) -> Graph:
    is_dynamic = batch.sequences > 1
    return load_graph(export_decoder(dims, batch, reduce_dtype, is_dynamic=is_dynamic))


def repeat_layer(graph: Graph, number: int, times: int) -> Graph:
    """Repeat a layer of a program behind itself.

    Args:
        graph: the program of a model whose layers are the modules `layers.0`, `layers.1`, ...
        number: of the layer; those before and behind it have the same operators.
        times: number of copies; the layers behind it get higher numbers.
    """
    if not times:
        return graph
    layer_of = [_layer_of(node.module) for node in graph.nodes]
    before, own = ([i for i, n in enumerate(layer_of) if n == m] for m in (number - 1, number))
    previous = [
        pair
        for i, j in zip(own, before, strict=True)
        for pair in zip(graph.nodes[i].outputs, graph.nodes[j].outputs, strict=True)
    ]
    made = {value for i in own for value in graph.nodes[i].outputs}
    own_inputs = [i for i in graph.inputs if _layer_of(i.target) == number]
    names = {*made, *(i.name for i in own_inputs)}
    values = dict(graph.values)
    copied: list[Node] = []
    new_inputs: list[Input] = []
    for copy in range(1, times + 1):
        renamed = {name: f"{name}.{copy}" for name in names}
        values |= {new: graph.values[name] for name, new in renamed.items()}
        new_inputs += [
            replace(_moved_input(i, number + copy), name=renamed[i.name]) for i in own_inputs
        ]
        # What comes from the layer before comes from the copy before.
        sent = {there: here if copy == 1 else f"{here}.{copy - 1}" for here, there in previous}
        copied += [_copied(graph.nodes[i], {**renamed, **sent}, copy, number) for i in own]
    last = {name: f"{name}.{times}" for name in made}
    behind = own[-1] + 1
    tail = [_behind(node, last, number, times) for node in graph.nodes[behind:]]
    return replace(
        graph,
        inputs=_ordered(graph, new_inputs, number, times),
        nodes=(*graph.nodes[:behind], *copied, *tail),
        values=values,
    )


def _layer_of(path: str) -> int | None:
    found = _LAYER.search(path)
    return int(found[1]) if found else None


def _moved(path: str, number: int) -> str:
    return _LAYER.sub(f"layers.{number}", path, count=1)


def _moved_input(entering: Input, number: int) -> Input:
    return replace(entering, target=_moved(entering.target, number))


def _copied(node: Node, names: dict[str, str], copy: int, number: int) -> Node:
    """A node of a copy of the layer with this number."""
    wired = rewire(node, lambda name: Ref(names.get(name, name)))
    return replace(
        wired,
        name=f"{node.name}.{copy}",
        outputs=tuple(names[value] for value in node.outputs),
        module=_moved(node.module, number + copy),
    )


def _behind(node: Node, last: dict[str, str], number: int, times: int) -> Node:
    """A node behind the copies, which reads the last copy instead of the layer."""
    wired = rewire(node, lambda name: Ref(last.get(name, name)))
    own = _layer_of(node.module)
    if own is None or own <= number:
        return wired
    return replace(wired, module=_moved(node.module, own + times))


def _ordered(graph: Graph, new: list[Input], number: int, times: int) -> tuple[Input, ...]:
    """The inputs with those of the copies among the parameters."""
    stored = [i for i in graph.inputs if i.kind is InputKind.PARAMETER]
    others = [i for i in graph.inputs if i.kind is not InputKind.PARAMETER]
    moved = []
    for entering in stored:
        own = _layer_of(entering.target)
        is_behind = own is not None and own > number
        moved.append(_moved_input(entering, own + times) if is_behind and own else entering)
    return (*moved, *new, *others)
