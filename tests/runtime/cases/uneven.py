"""Dims that an axis does not divide, cut all the same: models and checkpoints.

In double precision, so that nothing but the order of sums may differ from the whole model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import models
from support.comparison import check_training, close, device_mesh, whole
from support.hand_plans import Checked
from support.meshes import slow_devices
from support.models import graph_of
from support.uneven_plans import (
    EXACT,
    HAND,
    check_arguments,
    check_gathered_again,
    check_hand_plan,
    check_rests,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from autoshard.checker import check_plan
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import dcp_state_dict, parallelize


class Gpt2(nn.Module):
    """GPT-2 with an odd vocabulary and a loss in its own precision."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            n_positions=16,
            vocab_size=67,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        self.lm = GPT2LMHeadModel(config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm(ids, use_cache=False).logits
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
        )


class Heads(nn.Module):
    """Attention of 25 heads that come as a dim of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(25, 4, 4)) for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (x @ weight for weight in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.norm(seen).square().mean()


class Along(nn.Module):
    """What works along 18 features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 18)
        self.norm = nn.LayerNorm(18)
        self.out = nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x))
        h = torch.softmax(h, -1) + h.var(-1, keepdim=True) + h.amax(-1, keepdim=True)
        return self.out(h).square().mean()


def gpt2_case() -> models.Case:
    labels = torch.randint(0, 67, (4, 8))
    labels[0, :5] = -100
    return Gpt2(), {"ids": torch.randint(0, 67, (4, 8)), "labels": labels}


def rows_case() -> models.Case:
    features = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
    return features, {"input": torch.randn(10, 6, 8, dtype=torch.float64)}


MODELS: dict[str, Callable[[], models.Case]] = {
    "gpt2": gpt2_case,
    "heads": lambda: (Heads(), {"x": torch.randn(2, 25, 6, 4, dtype=torch.float64)}),
    "queries": lambda: (Heads(), {"x": torch.randn(2, 25, 10, 4, dtype=torch.float64)}),
    "along": lambda: (Along(), {"x": torch.randn(6, 8, dtype=torch.float64)}),
    "rows": rows_case,
}


def model_of(name: str) -> models.Case:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.double(), inputs


@dataclass
class Planned:
    """One model on one mesh, steered.

    Attributes:
        model: its name.
        options: that steer.
        cuts: values that something must take in this layout.
        axes: of the mesh.
    """

    model: str
    options: dict[str, Any]
    cuts: dict[str, str]
    axes: dict[str, int] = field(default_factory=lambda: {"a": 4})
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        graph = graph_of(model_of(self.model))
        options = PlanOptions(**self.options)
        plan = make_plan(graph, slow_devices(**self.axes), options)
        assert plan.found, plan.reason
        assert check_plan(plan, graph) == ()
        self.plan = Plan.from_json(plan.to_json())
        (stage,) = self.plan.stages
        taken = {placed.name: placed.inputs[0] for placed in stage.nodes}
        taken.update((n, p.layout) for p in stage.parameters for n in (p.target, *p.aliases))
        assert {name: taken[name] for name in self.cuts} == self.cuts

    def __call__(self) -> None:
        model, inputs = model_of(self.model)
        check_training(model, self.plan, kwargs=inputs, tolerance=EXACT)


LOSS = "cross_entropy_loss_cross_entropy_loss"
VOCABULARY = {
    "pins": {
        "parameters": {"lm.transformer.wte.weight": "S(0)"},
        "nodes": {LOSS: "S(1) R -> *", "embedding": "S(0) R -> P"},
    }
}
TIED = "lm.transformer.wte.weight"
ATTENTION = "scaled_dot_product_attention"
PLANNED = {
    "vocabulary": Planned("gpt2", VOCABULARY, {LOSS: "S(1)", "embedding": "S(0)", TIED: "S(0)"}),
    "vocabulary and batch": Planned(
        "gpt2",
        {"pins": {"nodes": {LOSS: "S(0),S(1) * -> *", "embedding": "R,S(0) * -> *"}}},
        {LOSS: "S(0),S(1)", "embedding": "R,S(0)"},
        {"dp": 2, "tp": 2},
    ),
    "vocabulary, checkpointed": Planned(
        "gpt2",
        {**VOCABULARY, "activation_checkpointing": "always"},
        {LOSS: "S(1)", "embedding": "S(0)"},
    ),
    "heads": Planned(
        "heads", {"pins": {"nodes": {ATTENTION: "S(1) S(1) S(1) -> S(1)"}}}, {ATTENTION: "S(1)"}
    ),
    "queries": Planned(
        "queries", {"pins": {"nodes": {ATTENTION: "S(2) R R -> S(2)"}}}, {ATTENTION: "S(2)"}
    ),
    "along": Planned(
        "along",
        {"pins": {"nodes": dict.fromkeys(("softmax", "var", "amax"), "S(1) -> *")}},
        {"softmax": "S(1)", "var": "S(1)", "amax": "S(1)"},
    ),
    "a batch of 10": Planned("rows", {"batch_axis": "a"}, {"gelu": "S(0)", "layer_norm": "S(0)"}),
}


@dataclass
class Saved:
    """What is saved under one plan is loaded under another, and by a whole model."""

    axes: dict[str, int]
    saved: dict[str, str]
    loaded: dict[str, str]
    plans: list[Plan] = field(default_factory=list)

    def prepare(self) -> None:
        graph = graph_of(model_of("gpt2"))
        for layouts in (self.saved, self.loaded):
            options = PlanOptions(pins={"parameters": layouts})
            plan = make_plan(graph, slow_devices(**self.axes), options)
            assert plan.found, plan.reason
            self.plans.append(plan)

    def __call__(self) -> None:
        folder = [mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        self.check(str(folder[0]))
        dist.barrier()
        if dist.get_rank() == 0:
            rmtree(str(folder[0]))

    def check(self, folder: str) -> None:
        mesh = device_mesh(self.plans[0])
        model, state = self.state(self.plans[0], mesh)
        expected = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
        moments = [whole(s["exp_avg"]).clone() for s in state["optimizer"].values()]
        assert any(moment.any() for moment in moments)
        dcp.save(dcp_state_dict(state), checkpoint_id=folder)

        plain = {"model": model_of("gpt2")[0].state_dict()}
        dcp.load(plain, checkpoint_id=folder)
        for name, tensor in expected.items():
            close(plain["model"][name], tensor, name, 0)

        other, state = self.state(self.plans[1], mesh)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        dcp.load(dcp_state_dict(state), checkpoint_id=folder)
        for name, tensor in expected.items():
            close(whole(other.state_dict()[name]), tensor, name, 0)
        for slots, moment in zip(state["optimizer"].values(), moments, strict=True):
            close(whole(slots["exp_avg"]), moment, "moment", 0)

    @staticmethod
    def state(plan: Plan, mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Any]]:
        """After a step, so that the optimizer has a state."""
        model, inputs = model_of("gpt2")
        parallelize(model, plan, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        model(**inputs).backward()
        optimizer.step()
        return model, {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
        }


CASES: dict[str, Callable[[], None]] = {
    **{f"by hand, {name}": Checked(make, check_hand_plan) for name, make in HAND.items()},
    "gathered again": Checked(HAND["fully sharded"], check_gathered_again),
    "at rest": Checked(HAND["fully sharded"], check_rests),
    "arguments": Checked(HAND["data parallel"], check_arguments),
    **PLANNED,
    "a checkpoint": Saved({"a": 4}, {"*.weight": "S(0)"}, {"*.weight": "I"}),
    "another checkpoint": Saved({"a": 4}, {"*": "I"}, {TIED: "S(0)"}),
    "a checkpoint with thirds": Saved(
        {"a": 2, "b": 2},
        {TIED: "S(0),S(1)", "*.c_attn.weight": "S(0),S(1)/1+1+1"},
        {TIED: "S(1),S(0)"},
    ),
}
