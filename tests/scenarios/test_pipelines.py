"""Pipeline stages of fairscale's and torch's tests: exact counts, and better balance."""

import math

import pytest
import torch
from support.evaluation import run_stages
from support.models import Case, graph_of, meta
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from autoshard import PlanOptions, make_mesh, make_plan
from autoshard.graph import Graph, StageCutter, export_model, load_graph
from autoshard.planner.pipeline.policies import cuts_of, stage_cutter

ONE_DEVICE = make_mesh((1,))


def split(cutter: StageCutter, **options: object) -> tuple[Graph, ...]:
    found = cuts_of(PlanOptions(**options), cutter, ONE_DEVICE)
    assert found is not None
    return cutter.split(found)


def new_parameters(stages: tuple[Graph, ...]) -> list[int]:
    """Number of parameters of each stage; one that several stages hold counts in the first."""
    seen: set[str] = set()
    found = []
    for stage in stages:
        own = [i for i in stage.parameters if i.name not in seen]
        seen.update(i.name for i in own)
        found.append(sum(stage.values[i.name].numel for i in own))
    return found


class LanguageModel(nn.Module):
    """The transformer of fairscale's test of `shard_model`."""

    def __init__(self, words: int = 28_783, features: int = 200, length: int = 35) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, features)
        self.layer = nn.TransformerEncoderLayer(features, 2, features, dropout=0.0)
        self.decoder = nn.Linear(features, words)
        places = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, features, 2) / features)
        table = torch.stack([places.sin(), places.cos()], -1).flatten(1)
        self.register_buffer("positions", table[:, None])
        self.scale = math.sqrt(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x) * self.scale + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), device=x.device)
        return self.decoder(self.layer(hidden, src_mask=mask))


def test_g6_three_stages_of_a_transformer_are_three() -> None:
    torch.manual_seed(0)
    model, x = LanguageModel(), torch.randint(0, 28_783, (35, 20))
    cutter = stage_cutter(graph_of((model, {"x": x})))
    for stages in (2, 3):
        parts = split(cutter, stages=stages, balance="parameters")
        numbers = new_parameters(parts)
        assert len(parts) == stages
        assert sum(numbers) == 5_998_600 + 5_785_383
    assert max(numbers) == 5_785_383
    ((out,), _) = run_stages(parts, model, {"x": x})
    assert out.shape == (35, 20, 28_783)
    torch.testing.assert_close(out, model(x))


class Branching(nn.Module):
    """The block of fairscale's test: what it computes depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 10)
        self.down = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(x) if x.sum() > 0 else self.down(x)


@pytest.mark.parametrize("weight", ["time", "flops", "parameters"])
def test_g7_three_stages_of_ten_branching_blocks_are_three(weight: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Branching() for _ in range(10))), torch.randn(4, 10)
    cutter = stage_cutter(load_graph(export_model(model, (x,), opaque="auto")))
    parts = split(cutter, stages=3, balance=weight)
    assert len(parts) == 3
    assert max(len(part.nodes) for part in parts) == 4
    assert sum(len(part.parameters) for part in parts) == 40
    for sign in (1, -1):
        ((out,), _) = run_stages(parts, model, {"input": sign * x})
        torch.testing.assert_close(out, model(sign * x))


def gpt2_small() -> Case:
    ids = torch.zeros(1, 16, dtype=torch.long)
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), {"input_ids": ids, "labels": ids}


@pytest.mark.thorough
def test_g8_stages_of_gpt2_are_balanced_and_as_many_as_asked_for() -> None:
    cutter = stage_cutter(graph_of(meta(gpt2_small)))
    by_layer = new_parameters(split(cutter, balance=(3, 3, 3, 3)))
    assert [round(number / 1e6) for number in by_layer] == [61, 21, 21, 21]
    by_size = new_parameters(split(cutter, stages=4, balance="parameters"))
    assert [round(number / 1e6) for number in by_size] == [39, 29, 28, 28]
    for stages in (1, 2, 3, 5, 7, 8, 12, 13, 14, 24, 50):
        for weight in ("parameters", "bytes", "time"):
            parts = split(cutter, stages=stages, balance=weight)
            assert len(parts) == stages
            assert sum(new_parameters(parts)) == sum(by_size)


class Perceptron(nn.Module):
    """Linear layers with a loss."""

    def __init__(self, layers: int, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, y)


def perceptron(layers: int = 4, batch: int = 64, features: int = 64) -> Graph:
    x = torch.zeros(batch, features)
    return graph_of((Perceptron(layers, features), {"x": x, "y": x}))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_g1_gradients_are_reduced_once_per_step(micro_batches: int) -> None:
    """Data parallel stages: as many gradient reductions for four micro-batches as for one."""
    pins = {"inputs": {"x": "Shard(0)", "y": "Shard(0)"}, "parameters": {"*": "Replicate()"}}
    options = PlanOptions(stages=2, schedule="GPipe", micro_batches=micro_batches, pins=pins)
    plan = make_plan(perceptron(), make_mesh((2, 2), topology="h100-sxm"), options)
    assert plan.pipeline is not None
    for summary in plan.pipeline.stages:
        reductions = [c for c in summary.collectives if c.direction == "backward"]
        assert {c.kind for c in reductions} == {"all_reduce"}
        assert sum(c.count for c in reductions) == 1
        # Of the loss, the mean over ranks.
        forward = [c for c in summary.collectives if c.direction == "forward"]
        assert sum(c.count for c in forward) <= micro_batches


def test_g5_small_stages_use_all_devices() -> None:
    options = PlanOptions(stages=2, micro_batches=2, sub_meshes="any")
    plan = make_plan(perceptron(layers=3), make_mesh((4,), topology="h100-sxm"), options)
    sizes = [math.prod(size for _, size in stage.axes) for stage in plan.stages]
    assert sum(sizes) == 4
    assert sizes == [2, 2]
