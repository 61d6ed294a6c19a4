"""Files of the library, the service and the cache import each other in one direction."""

import grimp
import networkx as nx

PACKAGES = ("autoshard", "autoshard_server", "autoshard_solver_cache")


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
