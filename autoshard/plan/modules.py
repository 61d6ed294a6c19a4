"""The modules of the model that each pipeline stage has."""

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.graph import Graph, Node, graph_from_json, module_paths
from autoshard.plan.document import Plan


@dataclass(frozen=True, slots=True)
class StageModules:
    """The modules of a stage, by the operators that only this stage runs.

    Attributes:
        whole: paths of the outermost modules that are in no other stage, in program order.
        parts: paths of modules of which other stages have operators too; empty for the root.
        first: the module of its first operator, or the operator itself if that is in none.
        last: the same of its last operator.
    """

    whole: tuple[str, ...]
    parts: tuple[str, ...]
    first: str
    last: str


def stage_modules(plan: Plan) -> tuple[StageModules, ...]:
    """The modules of each stage of a plan."""
    return modules_of([graph_from_json(stage.program) for stage in plan.stages])


def modules_of(programs: Sequence[Graph]) -> tuple[StageModules, ...]:
    """The modules of each of the programs of consecutive stages."""
    stages: dict[str, set[int]] = {}
    for number, program in enumerate(programs):
        for node in program.nodes:
            stages.setdefault(node.name, set()).add(number)
    owners: dict[str, set[int]] = {}
    own = [[n for n in program.nodes if len(stages[n.name]) == 1] for program in programs]
    for number, nodes in enumerate(own):
        for node in nodes:
            for path in module_paths(node.module):
                owners.setdefault(path, set()).add(number)
    return tuple(_stage(nodes, owners) for nodes in own)


def _stage(nodes: Sequence[Node], owners: dict[str, set[int]]) -> StageModules:
    whole: dict[str, None] = {}
    parts: dict[str, None] = {}
    names = []
    for node in nodes:
        found = next((p for p in module_paths(node.module) if len(owners[p]) == 1), None)
        if found is None:
            parts[node.module] = None
        else:
            whole[found] = None
        names.append(found or (f"part of {node.module}" if node.module else node.name))
    first, last = (names[0], names[-1]) if names else ("", "")
    return StageModules(tuple(whole), tuple(parts), first, last)
