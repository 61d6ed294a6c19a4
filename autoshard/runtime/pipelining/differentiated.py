"""Parameters that a loss does not depend on: they have no gradient, as without stages.

A stage sends a gradient for every value that it has received and that has one in the program,
zeros where the loss does not depend on it. Parameters of earlier stages would get zeros instead of
None, by which optimizers with momentum or weight decay change them.
"""

from collections.abc import Collection, Sequence

from autoshard.graph import Graph, graph_from_json
from autoshard.plan import Plan
from autoshard.report.requirements import loss_positions


class DifferentiatedParameters:
    """The parameters that each result of forward depends on, over all stages.

    Args:
        plan: with several stages.

    Attributes:
        results: positions of the results of forward with a gradient.
        scalars: those without dims.
    """

    def __init__(self, plan: Plan) -> None:
        graphs = [graph_from_json(stage.program) for stage in plan.stages]
        last = graphs[-1]
        named = [(n, o.name) for n, o in enumerate(last.outputs[: last.num_results]) if o.name]
        self._by_result = {
            position: _parameters_of(graphs, name)
            for position, name in named
            if last.values[name].requires_grad
        }
        self.results = tuple(self._by_result)
        self.scalars = tuple(loss_positions(last))
        self._all = frozenset(
            name for graph in graphs for i in graph.parameters for name in (i.target, *i.aliases)
        )

    def without_gradient(self, used: Collection[int]) -> frozenset[str]:
        """Names of the parameters that some results do not depend on.

        Args:
            used: positions of the results.
        """
        return self._all.difference(*(self._by_result[position] for position in used))


def _parameters_of(graphs: Sequence[Graph], result: str) -> frozenset[str]:
    """Names of the parameters that a value of the last program depends on."""
    reached = {result}
    for graph in reversed(graphs):
        for node in reversed(graph.nodes):
            if any(x in reached and graph.values[x].requires_grad for x in node.outputs):
                reached.update(x for x in node.inputs if graph.values[x].requires_grad)
    return frozenset(
        name
        for graph in graphs
        for i in graph.parameters
        if i.name in reached
        for name in (i.target, *i.aliases)
    )
