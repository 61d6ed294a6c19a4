"""Loading of an archive as a normalised graph."""

from dataclasses import replace
from pathlib import Path

from autoshard.base.collection import collection_paused
from autoshard.graph.archive.parse import parse_program
from autoshard.graph.archive.read import (
    ArchiveLimits,
    read_archive,
    with_contents,
    with_paths,
    with_precision,
)
from autoshard.graph.archive.tree_specs import spec_nodes
from autoshard.graph.ir import Graph
from autoshard.graph.normalise import normalise
from autoshard.graph.serialise import graph_to_json
from autoshard.graph.sizes.dynamic_shapes import find_dynamic
from autoshard.graph.sizes.symbolic_numbers import SymbolicNumbers


@collection_paused()
def load_graph(source: str | Path | bytes, *, limits: ArchiveLimits | None = None) -> Graph:
    """Read an exported program and normalise it.

    Args:
        source: path or bytes of a `.pt2` archive, or of its `models/model.json` alone.
        limits: size limits of the archive.

    Returns:
        The graph, normalised as `autoshard.graph.normalise` describes.

    Raises:
        ArchiveError: the archive cannot be read or exceeds a limit.
        SchemaError: the archive has no valid exported program of a supported schema version.
        UnsupportedError: the program uses a feature that cannot be planned.
    """
    limits = limits or ArchiveLimits()
    archive = read_archive(source, limits=limits)
    export = archive.export

    def read() -> Graph:
        program = parse_program(archive.model, max_nodes=limits.nodes)
        graph = normalise(program, ties=export.ties if export else None)
        for spec in (graph.in_spec, graph.out_spec):
            spec_nodes(spec)
        if export is not None:
            graph = with_precision(replace(graph, model=export.model), export)
        graph = with_contents(graph, archive.constants)
        return with_paths(graph, export.constants) if export is not None else graph

    numbers = SymbolicNumbers(archive.model)
    graph = read()
    dynamic = find_dynamic(numbers, graph_to_json(graph), lambda: graph_to_json(read()))
    if isinstance(dynamic, str):
        return replace(graph, fixed_sizes=dynamic)
    return replace(graph, dynamic=dynamic) if dynamic else graph
