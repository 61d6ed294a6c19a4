import torch
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn

from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.graph.gradients import Gradient, Gradients
from autoshard.planner import make_plan


class TwoHeads(nn.Module):
    """A loss, and beside it an output with a gradient that backward never asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.side = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.body(x))
        return hidden.square().sum(), self.side(hidden), hidden.argmax(-1)


def two_heads() -> Graph:
    return graph_of((TwoHeads(), {"x": torch.zeros(16, 16)}))


def test_gradients_enter_at_the_loss_and_run_backward_from_it() -> None:
    graph = two_heads()
    gradients = Gradients(graph, training=True)
    by_operator = {node.operator.split(".")[1]: node for node in graph.nodes}
    relu, argmax = by_operator["relu"].outputs[0], by_operator["argmax"]
    side = graph.nodes[[n.module for n in graph.nodes].index("side")]
    assert [gradients.of_output(i) for i in range(3)] == [
        Gradient.FLOWS,
        Gradient.UNPRICED,
        Gradient.NONE,
    ]
    assert gradients.of_value(relu) is Gradient.FLOWS
    assert gradients.of_use(relu, side) is Gradient.UNPRICED
    assert gradients.of_use(relu, argmax) is Gradient.NONE
    assert not gradients.flows(side)


def test_without_a_scalar_gradients_enter_at_every_output() -> None:
    graph = graph_of((nn.Linear(4, 4), {"input": torch.zeros(4, 4)}))
    assert Gradients(graph, training=True).of_output(0) is Gradient.FLOWS


def test_inference_has_no_gradients() -> None:
    graph = two_heads()
    gradients = Gradients(graph, training=False)
    assert not any(gradients.exists(value) for value in graph.values)


def test_backward_is_priced_only_where_it_runs() -> None:
    graph = two_heads()
    plan = make_plan(graph, slow_devices(a=4))
    assert check_plan(plan, graph) == ()
    gradients = Gradients(graph, training=True)
    nodes = {node.name: node for node in graph.nodes}
    for resharding in plan.stages[0].reshardings:
        if resharding.consumer in nodes and not gradients.flows(nodes[resharding.consumer]):
            assert all(step.backward == "nothing" for step in resharding.steps)
