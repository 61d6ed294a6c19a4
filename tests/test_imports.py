"""The structure of the code: files import each other in one direction, names are unique."""

import ast
from collections import defaultdict
from pathlib import Path

import grimp
import networkx as nx

PACKAGES = ("autoshard", "autoshard_server", "autoshard_solver_cache")

ROOT = Path(__file__).parents[1]
LIBRARY = ("autoshard", "server", "solver_cache")
"""Folders of these packages."""


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside of functions count too; those of packages by their own modules do not."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = nx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    assert len(imports) > 100
    assert [c for c in nx.strongly_connected_components(imports) if len(c) > 1] == []


def test_no_class_name_is_defined_twice() -> None:
    """Classes within functions and classes, and private ones, count too."""
    places = defaultdict(list)
    for path in python_files(*LIBRARY):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_file_is_long() -> None:
    files = python_files(*LIBRARY, "benchmarks", "docs", "examples", "tests")
    lengths = {path.relative_to(ROOT): len(path.read_text("utf-8").splitlines()) for path in files}
    assert len(lengths) > 500
    assert {path: length for path, length in lengths.items() if length > 600} == {}
