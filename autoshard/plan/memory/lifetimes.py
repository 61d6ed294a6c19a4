"""When memory is held in inference, where a value is freed after its last use.

Time is counted in nodes. Training has moments of its own, see
`autoshard.planner.memory_budget.checkpoints`.
"""

from autoshard.graph import Graph, Node
from autoshard.ops import is_view

Interval = tuple[int, int]
"""Half-open span of time."""


def input_interval(graph: Graph) -> Interval:
    """When an input of the graph is held: always."""
    return (0, max(len(graph.nodes), 1))


def output_interval(graph: Graph, time: int) -> Interval:
    """When what the node at `time` makes is held."""
    return (time, _last_use(graph, time, graph.nodes[time]) + 1)


def _last_use(graph: Graph, time: int, node: Node) -> int:
    """Index of the last node that reads a node's memory, also through views."""
    if any(output.name in node.outputs for output in graph.outputs):
        return len(graph.nodes) - 1
    last = time
    for user in (i for value in node.outputs for i, _ in graph.consumers[value]):
        reader = graph.nodes[user]
        last = max(last, _last_use(graph, user, reader) if is_view(reader.operator) else user)
    return last
