"""When memory is held: what lives at the same time must fit together.

Time is counted in nodes. In training everything that takes part in backward lives until
then, so there is one time only. Inference frees a value after its last use.
"""

from autoshard.graph import Graph, Node
from autoshard.rules import is_view

Interval = tuple[int, int]
"""Half-open span of time."""


def input_interval(graph: Graph, *, training: bool) -> Interval:
    """When an input of the graph is held: always."""
    return (0, 1) if training else (0, max(len(graph.nodes), 1))


def output_interval(graph: Graph, time: int, *, training: bool) -> Interval:
    """When what the node at `time` makes is held."""
    if training:
        return (0, 1)
    return (time, _last_use(graph, time, graph.nodes[time]) + 1)


def keeps_output(graph: Graph, node: Node, *, training: bool) -> bool:
    """Whether a node's outputs take memory of their own that is held.

    In training what takes part in backward is kept; the estimate is an upper one, since
    some operators need only one side of their work.
    """
    if is_view(node.operator):
        return False
    if not training:
        return True
    users = (graph.nodes[i] for v in node.outputs for i, _ in graph.consumers[v])
    values = (*node.outputs, *(v for user in users for v in user.outputs))
    return any(graph.values[v].requires_grad for v in values)


def _last_use(graph: Graph, time: int, node: Node) -> int:
    """Index of the last node that reads a node's memory, also through views."""
    if any(output.name in node.outputs for output in graph.outputs):
        return len(graph.nodes) - 1
    last = time
    for user in (i for value in node.outputs for i, _ in graph.consumers[value]):
        reader = graph.nodes[user]
        last = max(last, _last_use(graph, user, reader) if is_view(reader.operator) else user)
    return last
