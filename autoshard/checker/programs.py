"""Checks that the programs of pipeline stages are the parts of one program."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from autoshard.graph import OPAQUE_MODULE, Graph, InputKind, Node
from autoshard.ops import draws_random_numbers

_DATA, _STATE, _SINGLE = "user inputs", "parameters", "what runs once"
"""Origins of a value."""


def exchange_findings(programs: Sequence[Graph]) -> Iterator[str]:
    """Errors in what stages send and receive: each receives what the one before sends."""
    sent: list[str] = []
    for number, program in enumerate(programs):
        received = [i.name for i in program.inputs if i.kind is InputKind.RECEIVED]
        if sorted(received) != sorted(sent):
            before = f"stage {number - 1} sends {sent}" if number else "no stage is before it"
            yield f"stage {number} receives {received}, but {before}"
        sent = [o.name for o in program.outputs if o.sent and o.name is not None]
    if sent:
        yield f"the last stage sends {sent}, but no stage is after it"


def program_findings(programs: Sequence[Graph], whole: Graph) -> Iterator[str]:
    """Errors in the programs of stages: together they are the whole one.

    Every operator is in one stage; those that need not both user inputs and parameters may be in
    several. Results leave from the last stage, and a buffer that forward updates is in one stage.

    Args:
        programs: the programs of all stages.
        whole: the program that was cut.
    """
    for number, program in enumerate(programs):
        for finding in _part_findings(program, whole):
            yield f"stage {number}: {finding}"
    stages: dict[str, list[int]] = {node.name: [] for node in whole.nodes}
    for number, program in enumerate(programs):
        for node in program.nodes:
            stages.setdefault(node.name, []).append(number)
    for node in _placed(whole):
        if len(stages[node.name]) > 1:
            yield f"node {node.name} is in stages {stages[node.name]}, but it must run once"
    for name, numbers in stages.items():
        if not numbers:
            yield f"node {name} is in no stage"
    yield from _ends(programs, whole)


def _part_findings(program: Graph, whole: Graph) -> Iterator[str]:
    """Errors of one program, each member of which must be one of the whole."""
    numbers = [whole.numbers.get(node.name, -1) for node in program.nodes]
    for number, node in zip(numbers, program.nodes, strict=True):
        if number < 0 or whole.nodes[number] != node:
            yield f"node {node.name} is not one of the program"
    if any(first > second for first, second in pairwise(numbers)):
        yield "its nodes are not in the order of the program"
    for name, tensor in program.values.items():
        if whole.values.get(name) != tensor:
            yield f"value {name} is {tensor}, and {whole.values.get(name)} in the program"
    known = set(whole.inputs)
    for entering in program.inputs:
        if entering.kind is not InputKind.RECEIVED and entering not in known:
            yield f"input {entering.name} is not one of the program"
    if not set(program.rules) <= set(whole.rules) or program.model != whole.model:
        yield "its rules or its model are not those of the program"
    if not set(_preparation(program)) <= set(_preparation(whole)):
        yield "its preparation is not that of the program"


def _preparation(graph: Graph) -> tuple[Node, ...]:
    return () if graph.preparation is None else graph.preparation.nodes


def _placed(whole: Graph) -> Iterator[Node]:
    """Nodes that must be in one stage only."""
    needed = {_DATA, _STATE} if whole.parameters else {_DATA}
    sources: Mapping[InputKind, frozenset[str]] = {
        InputKind.USER: frozenset([_DATA]),
        InputKind.PARAMETER: frozenset([_STATE]),
    }
    derived = {
        i.name: frozenset([_SINGLE])
        if i.name in whole.updated
        else sources.get(i.kind, frozenset())
        for i in whole.inputs
    }
    for node in whole.nodes:
        found = frozenset[str]().union(*(derived[value] for value in node.inputs))
        if node.operator == OPAQUE_MODULE or draws_random_numbers(node):
            found |= {_SINGLE}
        if _SINGLE in found or needed <= found:
            yield node
        derived.update(dict.fromkeys(node.outputs, found))


def _ends(programs: Sequence[Graph], whole: Graph) -> Iterator[str]:
    """Errors in what leaves, and in the parameters and buffers that stages hold."""
    results = [o for o in whole.outputs if o.updates is None]
    *others, last = programs
    if [o for o in last.outputs if o.updates is None and not o.sent] != results:
        yield "the results of the last stage are not those of the program"
    if last.out_spec != whole.out_spec:
        yield "the last stage returns another structure than the program"
    for number, program in enumerate(others):
        if any(o.updates is None and not o.sent for o in program.outputs):
            yield f"stage {number} has results of forward, which leave from the last stage"
    holders = {
        i.name: [n for n, program in enumerate(programs) if i.name in _own_inputs(program)]
        for i in whole.inputs
        if i.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    }
    for i in whole.inputs:
        if i.name in holders and not holders[i.name]:
            yield f"{i.kind.value} {i.target} is in no stage"
    for buffer in whole.updated:
        updating = [n for n, program in enumerate(programs) if buffer in program.updated]
        if len(updating) != 1 or holders.get(buffer) != updating:
            yield (
                f"buffer {buffer} is in stages {holders.get(buffer)} and updated in {updating}: "
                f"all of that must be in one stage"
            )


def _own_inputs(program: Graph) -> set[str]:
    return {i.name for i in program.inputs if i.kind is not InputKind.RECEIVED}
