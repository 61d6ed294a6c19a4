from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.configs import write_config
from support.models import Case, bert, gpt2, graph_of, llama, meta
from torch import nn

from autoshard.graph import (
    DType,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    Ref,
    Tensor,
    find_blocks,
    load_graph,
)
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.model_files import export_named


class Stack(nn.Module):
    """Linear layers of given widths, one behind the other, each followed by two activations."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.relu(layer(x))) * 2.0
        return x


def stack(widths: list[int]) -> Graph:
    return graph_of((Stack(widths), {"x": torch.zeros(4, widths[0])}))


@pytest.mark.parametrize("build", [gpt2, bert, llama])
def test_every_layer_of_a_transformer_is_an_instance(build: Callable[..., Case]) -> None:
    graph = graph_of(meta(build, layers=4))
    (block,) = find_blocks(graph)
    assert block.count == 4
    operators = [[graph.nodes[i].operator for i in nodes] for nodes in block.instances()]
    assert all(names == operators[0] for names in operators)


def test_instances_hand_on_as_little_as_possible() -> None:
    """A cut between layers is crossed by the residual stream alone."""
    graph = graph_of(meta(gpt2, layers=4))
    (block,) = find_blocks(graph)
    first, second, *_ = map(set, block.instances())
    crossing = {
        value
        for i in second
        for value in graph.nodes[i].inputs
        if any(value in graph.nodes[j].outputs for j in first)
    }
    assert len(crossing) == 1


def test_equal_layers_are_found_and_unequal_ones_are_not() -> None:
    assert [(b.length, b.count) for b in find_blocks(stack([8] * 5))] == [(4, 4)]
    assert find_blocks(stack([8, 9, 10, 11, 12])) == ()


def test_the_first_layer_may_lack_the_gradient_of_its_input() -> None:
    graph = stack([8] * 3)
    (block,) = find_blocks(graph)
    assert (block.start, block.length, block.count) == (0, 4, 2)
    assert graph.kinds[0] != graph.kinds[4]
    assert graph.kinds[1:4] == graph.kinds[5:8]


def test_frozen_layers_are_a_block_of_their_own() -> None:
    model = Stack([8] * 9)
    for layer in model.layers[:4]:
        layer.requires_grad_(requires_grad=False)
    blocks = find_blocks(graph_of((model, {"x": torch.zeros(4, 8)})))
    assert [(block.length, block.count) for block in blocks] == [(4, 4), (4, 4)]


def test_two_kinds_of_layer_are_two_blocks() -> None:
    blocks = find_blocks(stack([8, 8, 8, 8, 16, 16, 16, 16]))
    assert [block.count for block in blocks] == [3, 3]


def test_blocks_do_not_overlap() -> None:
    blocks = find_blocks(stack([8] * 9))
    nodes = [i for block in blocks for instance in block.instances() for i in instance]
    assert len(nodes) == len(set(nodes))


def test_a_graph_without_nodes_has_no_blocks() -> None:
    assert find_blocks(graph_of((nn.Identity(), {"input": torch.zeros(2)}))) == ()


class Shared(nn.Module):
    """Layers that share one weight: the same value from outside for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(torch.relu(x @ self.weight)) * 2.0
        return x


def test_a_value_from_outside_may_be_shared() -> None:
    (block,) = find_blocks(graph_of((Shared(), {"x": torch.zeros(4, 8)})))
    assert block.count == 4


class Alternating(nn.Module):
    """Layers that look alike but take what the layer before the last one made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = torch.relu(x)
        for i, layer in enumerate(self.layers):
            source = x if i % 2 else other
            x, other = torch.tanh(layer(source)) * 2.0 + x, x
        return x


def test_layers_that_are_wired_differently_are_not_instances() -> None:
    blocks = find_blocks(graph_of((Alternating(), {"x": torch.zeros(4, 8)})))
    assert all(block.count < 4 for block in blocks)


def test_nodes_of_one_kind_differ_in_names_alone() -> None:
    def add(name: str, value: float) -> Node:
        arguments = (("self", Ref("x")), ("other", value))
        return Node(name, "aten.add.Scalar", arguments, (f"{name}_out",), module=name)

    nodes = (add("a", 1), add("b", True), add("c", 1.0), add("d", 1), add("e", 1))
    tensor = Tensor((2,), DType.FLOAT32)
    values = {
        "x": tensor,
        **{f"{n}_out": tensor for n in "abcd"},
        "e_out": Tensor((2,), DType.INT8),
    }
    graph = Graph((Input("x", InputKind.USER, "x"),), nodes, (Output("d_out"),), values)
    assert graph.kinds == (0, 1, 2, 0, 3)


@pytest.mark.parametrize(("layers", "period"), [(6, 2), (6, 3), (8, 2)])
def test_layers_that_share_different_masks_repeat_together(
    layers: int, period: int, tmp_path: Path
) -> None:
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    path = write_config(
        tmp_path,
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        head_dim=16,
        sliding_window=8,
        num_hidden_layers=layers,
        layer_types=kinds * (layers // period),
    )
    graph = load_graph(export_named(path, BatchShape(batch_size=2, seq_length=16)))
    (block,) = find_blocks(graph)
    assert block.count == layers // period
    assert block.stop - block.start > 0.9 * len(graph.nodes)
