"""The choices of a plan by name: the layouts of operators, parameters and other inputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autoshard.graph import graph_from_json
from autoshard.plan.document import Plan


@dataclass(frozen=True, slots=True)
class Choice:
    """An operator or an input of a plan, and its layout.

    Attributes:
        name: of the node; or of the input, as in the state dict or the arguments.
        kind: operator, parameter, buffer, user, ...
        operator: the node's operator; empty for an input.
        module: dotted path of the node's module; empty for an input.
        layouts: of its outputs, or of the input.
        time: seconds of compute in a step; 0 for an input.
    """

    name: str
    kind: str
    operator: str
    module: str
    layouts: str
    time: float


def find_choices(plan: Plan, pattern: str) -> tuple[Choice, ...]:
    """The choices that a name, a module path or a pattern stands for.

    A module path stands for the operators and parameters of the module and of those inside of it.
    In a pattern, `*` matches any text, including dots.
    """
    return tuple(dict.fromkeys(c for c in _choices(plan) if _matches(c, pattern)))


def _choices(plan: Plan) -> Iterator[Choice]:
    for stage in plan.stages:
        for given in stage.inputs:
            for name in (given.target, *given.aliases):
                yield Choice(name, given.kind, "", "", given.layout, 0.0)
        nodes = {node.name: node for node in graph_from_json(stage.program).nodes}
        for placed in stage.nodes:
            node = nodes[placed.name]
            layouts = " ".join(placed.outputs)
            yield Choice(node.name, "operator", node.operator, node.module, layouts, placed.time)


def _matches(choice: Choice, pattern: str) -> bool:
    if fnmatchcase(choice.name, pattern):
        return True
    path = choice.module if choice.kind == "operator" else choice.name
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))
