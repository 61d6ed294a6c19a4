"""Operators that ranks call in their own way, on real ranks: cut as planned, and exact."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers.integrations.moe  # noqa: F401  registers an operator
from support.comparison import check_training
from support.meshes import slow_devices
from support.models import Case as Built
from torch import nn
from torch.nn import functional

from autoshard.graph import export_model, load_graph
from autoshard.plan import Pins, Plan, PlanOptions
from autoshard.planner import make_plan


class Causal(nn.Module):
    """Causal attention without a mask over one long sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.project(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, 16)
        return functional.mse_loss(self.head(mixed), y)


class Patches(nn.Module):
    """One large image: patches, channels on their own, groups, and back to pixels."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, 16, 2, stride=2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.GroupNorm(4, 16)
        self.widen = nn.Conv2d(16, 32, 1)
        self.pixels = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.head = nn.Linear(8, 4)
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.widen(functional.gelu(self.norm(self.depthwise(self.patches(x)))))
        h = functional.interpolate(self.pixels(h), scale_factor=2.0, mode="nearest")
        scores = self.head(functional.adaptive_avg_pool2d(h, 1).flatten(1))
        return functional.cross_entropy(scores, y, self.weight, label_smoothing=0.1)


class Recommender(nn.Module):
    """Bags of ids beside a recurrence over a sequence with learned steps at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(32, 16, mode="sum")
        self.recurrence = nn.LSTM(16, 8, batch_first=True)
        self.steps = nn.Parameter(torch.randn(4, 16))
        self.head = nn.Linear(24, 1)

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        steps = self.steps.unsqueeze(0).repeat(x.shape[0], 1, 1)
        states, _ = self.recurrence(torch.cat([x, steps], 1))
        scores = self.head(torch.cat([self.bags(ids, offsets), states[:, -1]], 1))
        return functional.binary_cross_entropy_with_logits(scores.squeeze(1), y)


def causal() -> Built:
    return Causal(), {"x": torch.randn(1, 64, 16), "y": torch.randn(1, 64, 8)}


def patches() -> Built:
    return Patches(), {"x": torch.randn(1, 4, 32, 32), "y": torch.tensor([1])}


def recommender() -> Built:
    ids, offsets = torch.randint(0, 32, (16,)), torch.tensor([0, 2, 2, 7])
    return Recommender(), {
        "ids": ids,
        "offsets": offsets,
        "x": torch.randn(4, 6, 16),
        "y": torch.rand(4),
    }


class WeightedFirst(nn.Module):
    """Experts whose rows are weighted before they are multiplied.

    That is no mixture of experts as it is recognised, so its grouped products are cut as such.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 64) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        by_expert, order = torch.sort(ids.reshape(-1))
        # The CPU counts no integers, and the export is made for another device.
        counted = by_expert.float() if x.device.type == "cpu" else by_expert.int()
        ends = torch.histc(counted, bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        rows = x[order // 2] * weights.reshape(-1)[order][:, None]
        product = torch.ops.transformers.grouped_mm_fallback
        gate, up = product(rows, self.up, ends).chunk(2, -1)
        made = product(nn.functional.silu(gate) * up, self.down, ends)
        return made[torch.argsort(order)].view(-1, 2, 16).sum(1).square().mean()


def weighted_first() -> Built:
    return WeightedFirst(), {"x": torch.randn(64, 16)}


@dataclass
class Case:
    """A model, a mesh, how some operators are cut there, and what is pinned for that."""

    build: Callable[[], Built]
    axes: dict[str, int]
    cut: dict[str, str]
    pinned: dict[str, str] = field(default_factory=dict)
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        model, inputs = self.build()
        graph = load_graph(export_model(model, (), inputs))
        plan = make_plan(
            graph, slow_devices(**self.axes), PlanOptions(pins=Pins(nodes=self.pinned))
        )
        assert plan.found, plan.reason
        layouts = {node.name: node.inputs[0] for node in plan.stages[0].nodes if node.inputs}
        assert {name: layouts[name] for name in self.cut} == self.cut
        self.plan = Plan.from_json(plan.to_json())

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = self.build()
        check_training(model, self.plan, kwargs=inputs)


SDPA = "scaled_dot_product_attention"
CASES = {
    "causal 4": Case(causal, {"a": 4}, {SDPA: "S(2)"}, pinned={SDPA: "S(2)"}),
    "causal 2x2": Case(causal, {"a": 2, "b": 2}, {SDPA: "S(2),S(1)"}, pinned={SDPA: "S(2),S(1)"}),
    "patches 4": Case(
        patches,
        {"a": 4},
        {"conv2d": "S(2)", "conv2d_1": "S(1)", "group_norm": "S(1)", "conv_transpose2d": "S(2)"}
        | {"upsample_nearest2d": "S(2)", "adaptive_avg_pool2d": "S(2)"},
    ),
    "patches 2x2": Case(patches, {"a": 2, "b": 2}, {"conv2d": "S(2),S(2)"}),
    "recommender 4": Case(recommender, {"a": 4}, {"embedding_bag": "S(1)", "lstm": "S(0)"}),
    "grouped products 4": Case(weighted_first, {"a": 4}, {"histc": "S(0)"}),
    "grouped products 2x2": Case(
        weighted_first,
        {"a": 2, "b": 2},
        {"chunk": "S(0),S(1)/1+1", "grouped_mm_fallback_1": "S(0),S(0)"},
    ),
}
LONG = ("causal 4", "patches 2x2", "grouped products 4")
"""The models are in the others, on one mesh each."""
