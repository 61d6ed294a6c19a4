"""Graphs in the forms in which callers have them."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from autoshard.errors import ArgumentTypeError
from autoshard.graph.ir import Graph
from autoshard.graph.load import load_graph

if TYPE_CHECKING:
    from torch.export import ExportedProgram

GraphLike: TypeAlias = "Graph | ExportedProgram | str | Path | bytes"
"""A graph, or what one is loaded from: a program of `torch.export`, or a path or the bytes of a
`.pt2` archive or of its model.json."""


def to_graph(source: GraphLike) -> Graph:
    """The normalised graph of what a caller passed.

    Raises:
        ArgumentTypeError: it is none of these; the message says what to pass.
        GraphError: it cannot be loaded.
    """
    return source if isinstance(source, Graph) else load_graph(graph_source(source))


def graph_source(source: object) -> str | Path | bytes:
    """The source that `load_graph` reads, of what a caller passed.

    Raises:
        ArgumentTypeError: it is no graph; the message says what to pass.
        GraphError: the program cannot be saved.
    """
    if isinstance(source, str | Path | bytes):
        return source
    if _is_exported(source):
        from autoshard.graph.export.model import save_exported  # noqa: PLC0415 - torch is slow to import

        return save_exported(source)
    raise ArgumentTypeError(_what_to_pass(source))


def _is_exported(source: object) -> "TypeGuard[ExportedProgram]":
    # Who has such an object has imported torch.
    module = sys.modules.get("torch.export")
    return module is not None and isinstance(source, module.ExportedProgram)


def _what_to_pass(source: object) -> str:
    name = type(source).__name__
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.nn.Module):
        return (
            f"a module ({name}) is passed in place of a graph: pass "
            f"export_model(module, args, kwargs), or let auto_parallelize(module, args, kwargs, "
            f"mesh=...) export, plan and apply in one call"
        )
    return (
        f"{name} is passed in place of a graph: pass a Graph of load_graph, the result of "
        f"export_model or torch.export.export, or the path of a .pt2 file"
    )


def is_graph_file(source: str) -> bool:
    """True for the file of an exported graph, not a model that is to be exported.

    >>> is_graph_file("model.pt2"), is_graph_file("llama/config.json"), is_graph_file("a.py:make")
    (True, False, False)
    """
    path = Path(source)
    if path.suffix == ".json":
        return path.name != "config.json" and not _is_config(path)
    if path.is_dir():
        return not (path / "config.json").is_file()
    return path.suffix == ".pt2" or path.is_file()


def _is_config(path: Path) -> bool:
    """True for a JSON file with the type of a model of transformers."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "model_type" in document
