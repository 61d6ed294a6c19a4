"""Prepared inputs: each rank has its slice in separate memory."""

import pytest
import torch
from support.meshes import slow_devices
from torch import nn

from autoshard.errors import PlanError
from autoshard.graph import export_model, graph_from_json, graph_to_json, load_graph
from autoshard.layouts import Layout
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime.program.constants import prepared_inputs
from autoshard.runtime.program.local_node import Place


class Masked(nn.Module):
    """Rows that see the columns before them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0])[:, None]
        return x.masked_fill(rows < torch.arange(x.shape[1]), 0.0).square().mean()


def test_ranks_hold_what_the_plan_counts_and_time_none_of_its_making() -> None:
    graph = load_graph(export_model(Masked(), (torch.randn(8, 8),), {}))
    plan = make_plan(graph, slow_devices(a=2, b=2), PlanOptions(mode="inference"))
    (stage,) = plan.stages
    (placed,) = [i for i in stage.inputs if i.kind == "prepared"]
    assert {node.name for node in stage.nodes} == {node.name for node in graph.nodes}
    assert not any(node.operator.startswith(("aten.arange", "aten.lt")) for node in graph.nodes)
    assert plan.memory is not None
    whole = torch.arange(8)[:, None] < torch.arange(8)
    layout = Layout.parse(placed.layout)
    assert any(t.is_shard for t in layout.types)
    for coordinate in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        place = Place((2, 2), coordinate, torch.device("cpu"), 0)
        (held,) = prepared_inputs(graph, stage, place).values()
        slices = layout.local_slices(whole.shape, (2, 2), coordinate)
        (rows,), (columns,) = slices
        assert torch.equal(held, whole[rows, columns])
        assert held.untyped_storage().nbytes() == held.nbytes == plan.memory.buffers


def test_what_is_prepared_must_be_what_the_plan_says() -> None:
    graph = load_graph(export_model(Masked(), (torch.randn(8, 8),), {}))
    plan = make_plan(graph, slow_devices(a=2), PlanOptions(mode="inference"))
    document = graph_to_json(graph)
    for node in document["preparation"]["nodes"]:
        for argument in node["arguments"]:
            if argument == ["end", 8]:
                argument[1] = 9
    place = Place((2,), (0,), torch.device("cpu"), 0)
    with pytest.raises(PlanError, match=r"is torch.bool \[9, 9\] here, but bool \[8, 8\]"):
        prepared_inputs(graph_from_json(document), plan.stages[0], place)
