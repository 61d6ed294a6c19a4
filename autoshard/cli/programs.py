"""Programs as the command line reads them: with rules for what this library knows nothing of."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from autoshard.errors import OptionError
from autoshard.graph import Graph, load_graph, rules_from_json
from autoshard.ops import has_rule, with_rules
from autoshard.plan import Plan
from autoshard.solve import KeyValueStore


def read_program(
    path: Path,
    *,
    modules: Sequence[str] = (),
    discover: bool = True,
    store: KeyValueStore | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Graph:
    """The program of an archive, with rules that are found by running its operators.

    Args:
        path: of the archive.
        modules: Python modules to import first: they register operators of the model's own.
        discover: whether operators without a rule are run at all.
        store: keeps what was found for operators of ATen.
        report: told of each operator that cannot be tried, and why.

    Raises:
        GraphError: the archive cannot be read, or holds an operator that cannot be planned.
        OptionError: a module cannot be imported.
    """
    import_modules(modules)
    graph = load_graph(path)
    if not discover or all(has_rule(node.operator) or not node.inputs for node in graph.nodes):
        return graph
    from autoshard.discovery import discover as run  # noqa: PLC0415  torch is slow to import

    found = run(graph, store=store)
    for finding in found.findings:
        if finding.rule is None:
            report(f"{finding.operator} runs whole on every rank: {finding.reason}")
    return found.graph


def import_modules(modules: Sequence[str]) -> None:
    """Import modules that register operators.

    Raises:
        OptionError: one cannot be imported.
    """
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise OptionError(f"--import {module}: {error}") from error


def as_planned(path: Path, plan: Plan) -> Graph:
    """The program of an archive with the rules that its plan was made by.

    Raises:
        GraphError: the archive cannot be read, or the plan's rules are none.
    """
    rules = (rules_from_json(stage.program.get("rules", [])) for stage in plan.stages)
    return with_rules(load_graph(path), [rule for found in rules for rule in found])
