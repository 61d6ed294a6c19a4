"""Programs whose batch size is known at two sizes, against exports with others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import GraphError
from autoshard.graph import Graph, export_model, graph_to_json, load_graph, resized
from autoshard.graph import with_dynamic_batch as dynamic
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.model_files import export_named

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, **HEADS},
    "gemma2": {**SMALL, **HEADS, "head_dim": 16},
    "mixtral": {**SMALL, **HEADS, "num_local_experts": 4},
    "bert": {**SMALL, "num_attention_heads": 4},
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 64},
}


class Square(nn.Module):
    """Compares all samples with each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()).reshape(-1).sum()


class Bend(nn.Module):
    """Another program from 8 samples on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.relu() if x.shape[0] < 8 else x.relu().exp()).sum()


def program(model: nn.Module, batch: int) -> Graph:
    return load_graph(export_model(model, (torch.ones(batch, 4),)))


@pytest.mark.parametrize("name", CONFIGS)
def test_another_batch_size_is_that_of_its_export(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": name, **CONFIGS[name]}), encoding="utf-8")
    one, two, other = (
        load_graph(export_named(str(config), BatchShape(batch_size=size, seq_length=8)))
        for size in (4, 2, 16)
    )
    made = graph_to_json(resized(dynamic(one, two), {"batch": 16}))
    del made["dynamic"]
    assert made == graph_to_json(other)


def test_a_square_of_the_batch_size_is_an_error() -> None:
    with pytest.raises(GraphError, match="no multiple"):
        dynamic(program(Square(), 2), program(Square(), 4))


def test_another_program_is_an_error() -> None:
    with pytest.raises(GraphError, match="depends on the batch size"):
        dynamic(program(Bend(), 4), program(Bend(), 16))


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_sizes_that_say_nothing_are_errors(sizes: tuple[int, int]) -> None:
    with pytest.raises(GraphError, match="two different batch sizes"):
        dynamic(*(program(nn.Linear(4, 4), size) for size in sizes))
