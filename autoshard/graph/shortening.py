"""Shortening of programs: repeated blocks with fewer instances.

The plan of a program with four instances of a block shows how all others are planned: the first and
the last instance have other neighbours than those between, which are alike.
"""

from dataclasses import dataclass, replace

import numpy as np

from autoshard.base.arrays import IntArray
from autoshard.graph.blocks import Block, find_blocks
from autoshard.graph.ir import Graph, InputKind, Ref
from autoshard.graph.normalise.rewriting import rewire

_FIRST, _LAST = 2, 2
"""Number of instances that are kept at the beginning and at the end of a run."""


@dataclass(frozen=True)
class Shortened:
    """A program with fewer repetitions.

    Attributes:
        graph: the shorter program; the same one if nothing could be removed.
        node_of: index in it of each node of the whole program: of the node itself, or of the one
            at the same position of a kept instance; shape [nodes].
    """

    graph: Graph
    node_of: IntArray


def shorten(graph: Graph) -> Shortened:
    """Remove all but four instances of each repeated block, where no other node reads them."""
    twin: IntArray = np.arange(len(graph.nodes))
    renamed: dict[str, str] = {}
    removed: set[int] = set()
    for block in find_blocks(graph):
        if block.count > _FIRST + _LAST and _can_shorten(graph, block):
            instances = list(block.instances())
            kept = instances[_FIRST - 1]
            for span in instances[_FIRST:-_LAST]:
                twin[span.start : span.stop] = np.arange(kept.start, kept.stop)
                removed.update(span)
            for here, there in zip(instances[-_LAST - 1], kept, strict=True):
                renamed.update(
                    zip(graph.nodes[here].outputs, graph.nodes[there].outputs, strict=True)
                )
    if not removed:
        return Shortened(graph, twin)
    stays = [i for i in range(len(graph.nodes)) if i not in removed]
    nodes = tuple(rewire(graph.nodes[i], lambda name: Ref(renamed.get(name, name))) for i in stays)
    read = {value for node in nodes for value in node.inputs}
    read |= {output.name for output in graph.outputs if output.name is not None}
    optional = (InputKind.PARAMETER, InputKind.BUFFER)
    inputs = tuple(i for i in graph.inputs if i.kind not in optional or i.name in read)
    made = [i.name for i in inputs] + [value for node in nodes for value in node.outputs]
    short = replace(
        graph,
        inputs=inputs,
        nodes=nodes,
        values={name: graph.values[name] for name in made if name in graph.values},
        dynamic=None,
    )
    place: IntArray = np.full(len(graph.nodes), -1)
    place[stays] = np.arange(len(stays))
    return Shortened(short, place[twin])


def _can_shorten(graph: Graph, block: Block) -> bool:
    """True if results of the instances to remove are read only there and by the next instance."""
    returned = {output.name for output in graph.outputs} | set(graph.updated)
    for nodes in list(block.instances())[_FIRST - 1 : -_LAST]:
        following = range(nodes.start, nodes.stop + block.length)
        for i in nodes:
            node = graph.nodes[i]
            if not returned.isdisjoint((*node.outputs, *node.inputs)):
                return False
            readers = (reader for value in node.outputs for reader, _ in graph.consumers[value])
            if any(reader not in following for reader in readers):
                return False
    return True
