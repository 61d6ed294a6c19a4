"""A small language model, texts to train it on, and plans that shard it."""

from functools import cache
from typing import Any

import torch
from support.meshes import slow_devices
from support.models import gpt2
from torch import nn
from torch.utils.data import Dataset

from autoshard.graph import export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

BATCH, LENGTH, VOCABULARY = 8, 8, 64
MESHES = {"4": {"a": 4}, "2x2": {"a": 2, "b": 2}}
"""On 4 ranks."""
SHAPES = {**MESHES, "2": {"a": 2}}


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens; labels of some tokens are ignored, of each row another number."""

    def __init__(self, rows: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self._tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=draw)
        ignored = torch.rand(rows, LENGTH, generator=draw) < torch.rand(rows, 1, generator=draw)
        self._labels = self._tokens.masked_fill(ignored, -100)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


def language_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model, _ = gpt2(layers=1, dropout=dropout)
    model.config.use_cache = False
    return model


def with_settings(**changed: Any) -> dict[str, Any]:
    """Arguments of `TrainingArguments` for a short run on CPUs, and others."""
    return {
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **changed,
    }


@cache
def plans_of(
    mesh: str,
    dropout: float = 0.0,
    *,
    counts: bool = True,
    mixed_precision: str | None = None,
    interleaved: bool = False,
) -> dict[str, Plan]:
    """Plans for training and evaluation.

    Args:
        mesh: one of `MESHES`.
        dropout: of the model in training.
        counts: whether the loss is divided by a number of labels that is passed.
        mixed_precision: a `param_dtype`.
        interleaved: whether the fused weights of queries, keys and values are sharded inside each.
    """
    fused = ",".join(["S(1)/1+1+1", "I"][: len(SHAPES[mesh])])
    batch: dict[str, Any] = {
        name: torch.zeros(BATCH, LENGTH, dtype=torch.int64) for name in ("input_ids", "labels")
    }
    if counts:
        batch["num_items_in_batch"] = torch.tensor(1.0)
    model = language_model(dropout)
    plans: dict[str, Plan] = {}
    for name, mode in (("train", "training"), ("eval", "inference")):
        pins = {"parameters": {"*c_attn.weight": fused}} if interleaved else {}
        pins = plans["train"].state_pins() if plans else pins
        archive = export_model(
            model.train(name == "train"), (), batch, mixed_precision=mixed_precision
        )
        graph = load_graph(archive)
        plan = make_plan(graph, slow_devices(**SHAPES[mesh]), PlanOptions(mode=mode, pins=pins))
        assert plan.found
        assert plan.collectives
        plans[name] = plan
    assert any("S" in i.layout for i in plans["train"].stages[0].parameters)
    return plans
