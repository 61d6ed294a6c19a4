"""Operators along dims that are cut, on real ranks: the planned collectives inside, and exact."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from support.comparison import TOLERANCE, check_inference, check_training, close, whole
from support.meshes import slow_devices
from support.models import Case as Built
from torch import nn
from torch.nn import functional

from autoshard.checker import check_plan
from autoshard.graph import export_model, load_graph
from autoshard.plan import Pins, PlacedNode, Plan, PlanOptions
from autoshard.planner import make_plan


class Tokens(nn.Module):
    """Embeddings tied to the output, and the loss of the next tokens; some do not count."""

    def __init__(self, *, weighted: bool = False, smoothing: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.smoothing = smoothing
        weight = torch.linspace(0.5, 2.0, 32) if weighted else None
        self.register_buffer("weight", weight)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.norm(self.table(ids)) @ self.table.weight.T
        return functional.cross_entropy(
            scores.flatten(0, 1), labels.flatten(), self.weight, label_smoothing=self.smoothing
        )


class Picked(nn.Module):
    """The same loss from logarithms, which are also returned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logarithms = functional.log_softmax(self.table(ids) @ self.table.weight.T, dim=-1)
        flat = logarithms.flatten(0, 1)
        return functional.nll_loss(flat, labels.flatten()), logarithms


class Channels(nn.Module):
    """Convolutions with both norms of images, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 1)
        self.batch = nn.BatchNorm2d(8)
        self.groups = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.groups(torch.relu(self.batch(self.first(x)))).square().mean()


class Rows(nn.Module):
    """What else works along a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.RMSNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x))
        spread = h.std(-1) + h.var(-1) + torch.linalg.vector_norm(h, dim=-1)
        ends = h.amax(-1) - h.min(-1).values + torch.logsumexp(h, -1)
        return (spread + ends + (torch.softmax(h, -1) * h).sum(-1)).mean()


class Layers(nn.Module):
    """Equal layers with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Images(nn.Module):
    """Equal layers of convolutions with norms, in double precision."""

    def __init__(self, *, tracks: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 8, 1),
                nn.BatchNorm2d(8, track_running_stats=tracks),
                nn.ReLU(),
                nn.Conv2d(8, 4, 1),
            )
            for _ in range(4)
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Segments(nn.Module):
    """A small U-Net with overlapping windows all over, for the class of every place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3)
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(
            nn.Conv2d(8, 16, 5, padding=4, dilation=2, groups=2, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.third = nn.Conv2d(16, 8, 3, padding="same")
        self.head = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1)
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.first(self.stem(x))
        low = functional.max_pool2d(h, 3, stride=2, padding=1)
        low = self.second(low + functional.avg_pool2d(low, 3, 1, 1, count_include_pad=False))
        scores = self.head(self.third(torch.cat([self.up(low), h], 1)))
        return functional.cross_entropy(scores, labels)


def image(side: int) -> dict[str, torch.Tensor]:
    """One image, so that there is no batch to cut."""
    x = torch.randn(1, 3, side, side, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 4, (1, side, side))}


class Next(nn.Module):
    """The likeliest token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids) @ self.table.weight.T).argmax(-1)


def tokens() -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 32, (4, 8))
    labels[0] = -100
    labels[1, :3] = -100
    return {"ids": torch.randint(0, 32, (4, 8)), "labels": labels}


@dataclass
class Case:
    """A model, a mesh, and what runs inside operators that are pinned to be cut there.

    What runs is written as `max@a sum@a | sum@a`: the axes of each all-reduce, forward and
    backward.
    """

    build: Callable[[], Built]
    axes: dict[str, int]
    pins: dict[str, str]
    inside: dict[str, str]
    mode: str = "training"
    activation_checkpointing: str = "never"
    tolerance: float = TOLERANCE
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        model, inputs = self.build()
        graph = load_graph(export_model(model, (), inputs))
        options = PlanOptions(
            pins=Pins(nodes=self.pins),
            mode=self.mode,
            activation_checkpointing=self.activation_checkpointing,
        )
        plan = make_plan(graph, slow_devices(**self.axes), options)
        assert plan.found, plan.reason
        assert check_plan(plan, graph) == ()
        inside = {node.name: listed(node) for node in plan.stages[0].nodes}
        assert {name: inside[name] for name in self.inside} == self.inside
        assert bool(plan.stages[0].checkpoints) == (self.activation_checkpointing == "always")
        self.plan = Plan.from_json(plan.to_json())

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = self.build()
        reference = copy.deepcopy(model)
        reference(**inputs)
        if self.mode == "training":
            check_training(model, self.plan, kwargs=inputs, tolerance=self.tolerance)
        else:
            check_inference(model, self.plan, kwargs=inputs)
        # A program has no place for a count of batches; what norms track is up to date.
        tracked = {n: b for n, b in reference.named_buffers() if b.is_floating_point()}
        for name, buffer in tracked.items():
            close(whole(model.get_buffer(name)), buffer, name, self.tolerance)


def listed(node: PlacedNode) -> str:
    """What runs inside a node."""
    forward, backward = (
        " ".join(f"{s.operation}@{s.axis}" for s in node.inside if s.direction == direction)
        for direction in ("forward", "backward")
    )
    return f"{forward} | {backward}" if backward else forward


LOSS = "cross_entropy_loss_cross_entropy_loss"
CASES = {
    "classes": Case(
        lambda: (Tokens(), tokens()), {"a": 4}, {LOSS: "S(1) R -> I"}, {LOSS: "max@a sum@a"}
    ),
    "classes and batch": Case(
        lambda: (Tokens(smoothing=0.1), tokens()),
        {"a": 2, "b": 2},
        {LOSS: "S(0),S(1) * -> *"},
        {LOSS: "max@b sum@b"},
    ),
    "weighted classes on two axes": Case(
        lambda: (Tokens(weighted=True), tokens()),
        {"a": 2, "b": 2},
        {LOSS: "S(1),S(1) * * -> *", "layer_norm": "S(2),* * * -> *"},
        {LOSS: "max@a max@b sum@a sum@b", "layer_norm": "sum@a sum@a | sum@a"},
    ),
    "picked classes": Case(
        lambda: (Picked(), tokens()),
        {"a": 2, "b": 2},
        {"log_softmax": "S(0),S(2) -> *", "nll_loss_nd": "S(0),S(1) * -> *"},
        {"log_softmax": "max@b sum@b | sum@b", "nll_loss_nd": "sum@a"},
    ),
    "channels": Case(
        lambda: (Channels(), {"x": torch.randn(4, 4, 4, 4)}),
        {"a": 2, "b": 2},
        {"batch_norm": "S(0),S(2) * * * * -> *", "group_norm": "S(0),S(3) * * -> *"},
        {
            "batch_norm": "sum@a sum@b sum@a sum@b | sum@a sum@b",
            "group_norm": "sum@b sum@b | sum@b",
        },
    ),
    "rows": Case(
        lambda: (Rows(), {"x": torch.randn(4, 8)}),
        {"a": 4},
        {
            **dict.fromkeys(("std", "var", "linalg_vector_norm", "amax"), "S(1) -> I"),
            "logsumexp": "S(1) -> I",
            "softmax": "S(1) -> S(1)",
            "rms_norm": "S(1) S(0) -> S(1)",
            "min_1": "S(1) -> I R",
        },
        {
            "std": "sum@a sum@a",
            "var": "sum@a sum@a",
            "linalg_vector_norm": "sum@a",
            "amax": "max@a | sum@a",
            "min_1": "max@a max@a",
            "logsumexp": "max@a sum@a",
            "softmax": "max@a sum@a | sum@a",
            "rms_norm": "sum@a | sum@a",
        },
    ),
    "layers that run again": Case(
        lambda: (Layers(), {"x": torch.randn(8, 16)}),
        {"a": 2, "b": 2},
        {"layer_norm*": "S(0),S(1) * * -> *"},
        {"layer_norm_1": "sum@b sum@b | sum@b"},
        activation_checkpointing="always",
    ),
    **{
        f"statistics that run again, {name}": Case(
            lambda: (Images(), {"x": torch.randn(4, 4, 4, 4).double()}),
            {"a": 2, "b": 2},
            {"batch_norm*": pin},
            {"batch_norm_1": inside},
            activation_checkpointing="always",
            tolerance=1e-10,
        )
        for name, pin, inside in [
            ("whole", "R,R R,R R,R R,R R,R -> R,R", ""),
            ("cut batch", "S(0),R *,R *,R *,R *,R -> *,R", "sum@a sum@a | sum@a"),
            (
                "cut batch and rows",
                "S(0),S(2) * * * * -> *",
                "sum@a sum@b sum@a sum@b | sum@a sum@b",
            ),
        ]
    },
    "channels that run again": Case(
        lambda: (Images(tracks=False), {"x": torch.randn(4, 4, 4, 4).double()}),
        {"a": 2, "b": 2},
        {"batch_norm*": "S(0),S(1) *,S(0) *,S(0) -> *"},
        {"batch_norm_1": "sum@a sum@a | sum@a"},
        activation_checkpointing="always",
        tolerance=1e-10,
    ),
    **{
        f"an image, {name}": Case(
            lambda: (Segments(), image(64)),
            axes,
            pins,
            dict.fromkeys(nodes.split(), ran) | {"conv2d": ran.partition(" |")[0]},
            tolerance=1e-10,
        )
        for name, axes, nodes, pins, ran in [
            ("freely", {"a": 4}, "conv2d_1 conv2d_2 conv_transpose2d", {}, "halo@a | halo@a"),
            (
                "rows and columns",
                {"a": 2, "b": 2},
                "conv2d_1 conv2d_2 conv_transpose2d avg_pool2d",
                {
                    "conv2d_2": "S(2),S(3) * -> *",
                    "conv_transpose2d": "S(2),S(3) * * -> *",
                    **dict.fromkeys(("max_pool2d", "avg_pool2d"), "S(2),S(3) -> *"),
                },
                "halo@a halo@b | halo@b halo@a",
            ),
        ]
    },
    "the next token": Case(
        lambda: (Next(), {"ids": torch.randint(0, 32, (4, 8))}),
        {"a": 4},
        {"argmax": "S(2) -> R"},
        {"argmax": "max@a max@a"},
        mode="inference",
    ),
}
