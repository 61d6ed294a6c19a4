"""Buffers that forward updates: counters, running statistics, caches."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.comparison import close, device_mesh, whole
from support.meshes import slow_devices
from support.shared_folder import shared_folder
from torch import nn

from autoshard.checker import check_plan
from autoshard.errors import PlanError
from autoshard.graph import Graph, export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import dcp_state_dict, parallelize

FEATURES, HEADS, LENGTH, STEPS = 32, 4, 32, 32


class Counted(nn.Module):
    """Integer counters that forward increments and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 64)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(FEATURES, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.add_((x > 0).sum(0).to(torch.int32))
        hidden = self.norm(self.up(x / self.calls.float()))
        return hidden.square().mean() * self.norm.num_batches_tracked + self.seen.float().mean()


class Averaged(nn.Module):
    """Running statistics of float buffers: a mean that is assigned, and a scale that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 64)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("scale", torch.ones(64))
        self.register_buffer("codes", torch.randn(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x) * self.scale.clone()
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
            self.scale.mul_(0.9).add_(0.1 * hidden.abs().amax(0))
            self.codes[:4] = self.codes[:4] * 0.5 + hidden[:4] * 0.5
        return (hidden - self.mean).square().mean() + (hidden @ self.codes.T).square().mean()


class Exchanged(nn.Module):
    """Buffers that get each other's contents, and a result from before the update."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 64)
        self.register_buffer("one", torch.randn(64))
        self.register_buffer("other", torch.randn(64))
        self.register_buffer("square", torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.one.clone()
        with torch.no_grad():
            self.one.copy_(self.other)
            self.other.copy_(before)
            self.square.copy_(self.square.t().clone())
        return self.up(x).square().mean() + (before * torch.arange(64)).mean()


class Returned(Exchanged):
    """Returns what a buffer had before the update."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.one.clone()
        super().forward(x)
        return before


class Attention(nn.Module):
    """Attention to the keys and values of earlier calls."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES)
        self.out = nn.Linear(FEATURES, FEATURES)
        shape = (batch, HEADS, LENGTH, FEATURES // HEADS)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], HEADS, FEATURES // HEADS)
        query, key, value = (y.view(shape).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, at, key)
        self.values[:, :, at] = value
        mixed = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Layers of attention with caches, one token a call."""

    def __init__(self, batch: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(batch) for _ in range(layers)])
        self.head = nn.Linear(FEATURES, 64, bias=False)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(LENGTH) <= at)[None, None, None]
        for layer in self.layers:
            x = x + layer(x, at, mask)
        return self.head(x)


MESHES = {"4": {"a": 4}, "2x2": {"a": 2, "b": 2}}


@dataclass
class Stateful:
    """A planned model beside the same model on one device, call after call.

    Attributes:
        build: makes the model.
        calls: the arguments of each call.
        axes: of the mesh.
        options: of the plan.
        sharded: buffers that the plan shards; None if that does not matter.
        export: options of the export.
        check: further comparison of the planned model, the other one, and the calls.
    """

    build: Callable[[], nn.Module]
    calls: Callable[[], Sequence[dict[str, torch.Tensor]]]
    axes: dict[str, int]
    sharded: frozenset[str] | None
    options: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)
    check: Callable[["Stateful"], None] | None = None
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = load_graph(export_model(self.build(), (), self.calls()[0], **self.export))
        self.plan = make_plan(graph, slow_devices(**self.axes), PlanOptions(**self.options))
        assert check_plan(self.plan, graph) == ()
        stage = self.plan.stages[0]
        updated = {output.updates for output in stage.outputs}
        found = {i.target for i in stage.inputs if i.name in updated and i.local_shape != i.shape}
        assert self.sharded in (None, found)

    def models(self) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        reference = self.build()
        planned = deepcopy(reference)
        return reference, parallelize(planned, self.plan, device_mesh(self.plan))

    def __call__(self) -> None:
        if self.check is not None:
            self.check(self)
            return
        reference, planned = self.models()
        for arguments in self.calls():
            compare_call(reference, planned, arguments)


def compare_call(
    reference: nn.Module, planned: nn.Module, arguments: dict[str, torch.Tensor]
) -> None:
    """Result, gradients and buffers of a call are those of the model on one device."""
    with torch.set_grad_enabled(reference.training):
        expected = reference(**arguments)
    found = planned(**arguments)
    close(whole(found.detach()), expected.detach(), "result")
    if reference.training:
        expected.backward()
        found.backward()
        gradients = {name: p.grad for name, p in reference.named_parameters()}
        for name, parameter in planned.named_parameters():
            close(whole(parameter.grad), gradients[name], f"gradient of {name}")
    compare_buffers(reference, planned)


def compare_buffers(reference: nn.Module, planned: nn.Module) -> None:
    present = dict(planned.named_buffers())
    assert list(planned.state_dict()) == list(reference.state_dict())
    for name, buffer in reference.named_buffers():
        assert present[name].dtype is buffer.dtype
        close(whole(present[name]), buffer, f"buffer {name}")


def batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, FEATURES, generator=generator)} for _ in range(count)]


def tokens(count: int = STEPS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(2, 1, FEATURES, generator=generator), "at": torch.tensor([i])}
        for i in range(count)
    ]


def check_copies(case: Stateful) -> None:
    """A deep copy has buffers of its own."""
    reference, planned = case.models()
    first, second, *_ = case.calls()
    copied = deepcopy(planned)
    compare_call(reference, copied, first)
    fresh, _ = case.models()
    compare_buffers(fresh, planned)
    compare_call(reference, copied, second)
    compare_call(fresh, planned, first)


def check_checkpoints(case: Stateful) -> None:
    """Buffers come back from a distributed checkpoint, and from a plain state dict."""
    reference, planned = case.models()
    first, second, *_ = case.calls()
    compare_call(reference, planned, first)
    _, restored = case.models()
    with shared_folder() as folder:
        dcp.save(dcp_state_dict(planned.state_dict()), checkpoint_id=folder)
        state = restored.state_dict()
        dcp.load(dcp_state_dict(state), checkpoint_id=folder)
    compare_buffers(reference, restored)
    planned.zero_grad()
    reference.zero_grad()
    compare_call(reference, restored, second)


@dataclass
class ShardedStatistics:
    """A plan, made by other means, that shards what a batch norm changes in place."""

    plan: Plan = field(init=False)

    def prepare(self) -> None:
        graph = load_graph(export_model(Counted(), (torch.randn(8, FEATURES),)))
        options = PlanOptions(pins={"buffers": {"*running_mean": "S(0)"}})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Graph, "running_statistics", frozenset())
            self.plan = make_plan(graph, slow_devices(a=4), options)
        assert self.plan.found

    def __call__(self) -> None:
        with pytest.raises(
            PlanError, match=r"'norm\.running_mean' is sharded.*without a pin of it"
        ):
            parallelize(Counted(), self.plan, device_mesh(self.plan))


COUNTED = frozenset({"seen"})
AVERAGED = frozenset({"mean", "scale", "codes"})
CACHES = frozenset(f"layers.{i}.{name}" for i in range(2) for name in ("keys", "values"))
INFERENCE = {"mode": "inference"}

CASES: dict[str, Callable[[], None]] = {
    **{
        f"{name}, {mesh}": case
        for mesh, axes in MESHES.items()
        for name, case in {
            "counters": Stateful(Counted, batches, axes, COUNTED),
            "running statistics": Stateful(Averaged, batches, axes, AVERAGED),
            "key-value cache": Stateful(lambda: Decoder().eval(), tokens, axes, CACHES, INFERENCE),
        }.items()
    },
    **{
        f"exchanged, {model.__name__}, {options.get('mode', 'training')}": Stateful(
            (lambda model=model, options=options: model().train(not options)),
            batches,
            MESHES["4"],
            None,
            options,
        )
        for model, options in [(Exchanged, {}), (Exchanged, INFERENCE), (Returned, INFERENCE)]
    },
    "a copy": Stateful(Averaged, batches, MESHES["2x2"], AVERAGED, check=check_copies),
    "sharded statistics": ShardedStatistics(),
    "a checkpoint": Stateful(Averaged, batches, MESHES["4"], AVERAGED, check=check_checkpoints),
}
