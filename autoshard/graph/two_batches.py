"""A program of any batch size, made of a model's exports with two batch sizes.

An export with a dynamic batch size has symbols in every layer, and traces each of them. For a model
of 64 layers it takes three times as long as two exports with fixed sizes, in which equal layers are
traced once.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autoshard.errors import GraphError
from autoshard.graph.ir import Graph, InputKind
from autoshard.graph.serialise import graph_to_json
from autoshard.graph.sizes.dynamic_sizes import LEAST_SIZE, Dynamic, Path, Symbol, Terms

BATCH = "batch"
"""Name of the dynamic size."""


def with_dynamic_batch(one: Graph, other: Graph) -> Graph:
    """The first of two exports of a model, with its batch size as a dynamic size.

    Every number that differs must be the same multiple of both batch sizes, and is taken to be that
    multiple of others. No condition of forward on the batch size is known: what a model computes
    only from some batch size on is not seen, so that the result is for estimates, and what is run
    has an export of its own.

    Args:
        one: the program with one batch size, dim 0 of its arguments.
        other: the same with another.

    Raises:
        GraphError: the programs differ in more than such numbers, or in none.

    >>> graph = with_dynamic_batch(graph_of_8, graph_of_16)  # doctest: +SKIP
    >>> resized(graph, {"batch": 64})  # doctest: +SKIP
    """
    first, second = _batch_size(one), _batch_size(other)
    if first == second or min(first, second) < LEAST_SIZE:
        raise GraphError(
            f"two different batch sizes of 2 or more are needed, not {first}, {second}"
        )
    places: defaultdict[Terms, list[Path]] = defaultdict(list)
    documents = graph_to_json(one), graph_to_json(other)
    for path, number, changed in _differences(*documents, ()):
        factor, rest = divmod(number, first)
        # A multiple at both sizes: the square of a size, for instance, is none.
        if rest or factor * second != changed:
            raise _differs(path)
        places[((factor, (BATCH,)),)].append(path)
    symbol = Symbol(BATCH, planned=first, least=LEAST_SIZE, most=None)
    sizes = tuple((terms, tuple(paths)) for terms, paths in places.items())
    return replace(one, dynamic=Dynamic((symbol,), sizes))


def _batch_size(graph: Graph) -> int:
    given = (graph.values[i.name].shape for i in graph.inputs if i.kind is InputKind.USER)
    return next((shape[0] for shape in given if shape), 0)


def _differences(one: Any, other: Any, path: Path) -> Iterator[tuple[Path, int, int]]:
    """The paths of the numbers in which two documents differ, with both numbers.

    Raises:
        GraphError: they differ in something else.
    """
    match one, other:
        case dict(), dict() if one.keys() == other.keys():
            for key in one:
                yield from _differences(one[key], other[key], (*path, key))
        case list(), list() if len(one) == len(other):
            for index, pair in enumerate(zip(one, other, strict=True)):
                yield from _differences(*pair, (*path, index))
        case bool(), bool() if one != other:
            raise _differs(path)
        case int(), int():
            if one != other:
                yield path, one, other
        case _ if type(one) is not type(other) or one != other:
            raise _differs(path)


def _differs(path: Path) -> GraphError:
    place = ".".join(map(str, path))
    return GraphError(f"{place} depends on the batch size, and is no multiple of it")
