"""What users do with gradients, where collectives of parameters run beside other work."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from support import models
from support.comparison import close, device_mesh, whole
from support.meshes import slow_devices
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.graph import graph_from_json
from autoshard.lowering.buckets import buckets_of
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize

ROWS = dict.fromkeys(("*.attn", "*.mlp", "*.c_*", "*.ln_*", "lm_head"), "S(0)")
MLP = {"pins": {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}, "nodes": {"*": "S(0)"}}}
HEADS = {"pins": {"parameters": {"*": "I"}, "inputs": {"*": "S(0)"}, "nodes": {"*": "S(0)"}}}
CUT = {"pins": {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}, "nodes": ROWS}}
MIXED = {
    "pins": {
        "parameters": {"*.wte.weight": "I", "*.h.*": "S(0)"},
        "inputs": {"*": "S(0)"},
        "nodes": ROWS,
    }
}
WHOLE = {"pins": {"parameters": {"*": "I"}, "inputs": {"*": "S(0)"}, "nodes": ROWS}}


@dataclass
class Case:
    """A planned model beside the same model on one device.

    Attributes:
        options: of the plan.
        check: takes the model, the planned one, and what both are called with.
        build: makes the model.
        ranks: that run it.
    """

    options: dict[str, Any]
    check: Callable[[nn.Module, nn.Module, dict[str, Any]], None]
    build: Callable[[], models.Case] = models.gpt2
    ranks: int = 4
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = models.graph_of(self.build())
        self.plan = make_plan(graph, slow_devices(dp=self.ranks), PlanOptions(**self.options))
        stage = self.plan.stages[0]
        found = buckets_of(stage, graph_from_json(stage.program))
        assert any(len(bucket.reshardings) > 1 for bucket in found)
        assert any(bucket.checkpoint >= 0 for bucket in found) == (
            "activation_checkpointing" in self.options
        )

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference, inputs = self.build()
        torch.manual_seed(0)
        planned = parallelize(self.build()[0], self.plan, device_mesh(self.plan))
        self.check(reference, planned, inputs)


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    result = model(**inputs)
    return result.square().sum() if isinstance(result, torch.Tensor) else result["loss"]


def compare_gradients(reference: nn.Module, planned: nn.Module, tolerance: float = 1e-5) -> None:
    found = dict(planned.named_parameters())
    for name, parameter in reference.named_parameters():
        close(whole(found[name].grad), parameter.grad, name, tolerance)


def accumulated(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """Two steps' gradients, then two passes over one graph, add up."""
    for model in (reference, planned):
        for _ in range(2):
            loss_of(model, inputs).backward()
        loss = loss_of(model, inputs)
        loss.backward(retain_graph=True)
        loss.backward()
    compare_gradients(reference, planned)


def asked_for(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """`torch.autograd.grad` gives what backward adds up, and leaves `grad` alone.

    So does a backward pass for some parameters with the others.
    """
    given = torch.autograd.grad(loss_of(planned, inputs), list(planned.parameters()))
    assert all(parameter.grad is None for parameter in planned.parameters())
    first, *others = planned.parameters()
    loss_of(planned, inputs).backward(inputs=[first])
    assert torch.equal(first.grad.to_local(), given[0].to_local())
    assert all(parameter.grad is None for parameter in others)
    loss_of(reference, inputs).backward()
    for gradient, (name, parameter) in zip(given, reference.named_parameters(), strict=True):
        close(whole(gradient), parameter.grad, name)


def hooked(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """Hooks see summed gradients, and clipping the norm of all of them."""
    seen = {}
    for name, parameter in planned.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.update({name: p.grad.to_local().clone()})
        )
    for model in (reference, planned):
        with torch.no_grad():
            close(whole(loss_of(model, inputs)), loss_of(reference, inputs), "loss")
        loss_of(model, inputs).backward()
    compare_gradients(reference, planned)
    for name, parameter in planned.named_parameters():
        assert torch.equal(seen[name], parameter.grad.to_local()), name
    norms = [
        whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        for model in (reference, planned)
    ]
    close(norms[1], norms[0], "norm")
    compare_gradients(reference, planned)


def scaled(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """Where a gradient is infinite on one rank alone, all ranks leave the step out."""
    runs = []
    for model in (reference, planned):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        runs.append((model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0)))
    for step in range(3):
        for model, optimizer, scaler in runs:
            scaler.scale(loss_of(model, inputs)).backward()
            if step == 1:
                _overflow(model.transformer.h[1].mlp.c_fc.weight.grad)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert {scaler.get_scale() for *_, scaler in runs} == {512.0 if step else 1024.0}
    found = dict(planned.named_parameters())
    for name, parameter in reference.named_parameters():
        close(whole(found[name].detach()), parameter.detach(), name)


def _overflow(gradient: torch.Tensor) -> None:
    """Make the last element infinite; of a gradient that is cut only the last rank has it."""
    if isinstance(gradient, DTensor):
        assert any(placement.is_shard() for placement in gradient.placements)
        gradient = gradient.to_local()
        if dist.get_rank() < dist.get_world_size() - 1:
            return
    gradient[-1, -1] = torch.inf


class Narrow(nn.Module):
    """Two products in float16, of parameters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = nn.functional.linear(x.half(), layer.weight.half(), layer.bias.half())
        return x.float()


def narrow() -> models.Case:
    """One of 16 rows is so large that its gradients overflow where a loss is scaled by 1024."""
    x = torch.randn(16, 8)
    x[-1] *= 100
    return Narrow(), {"x": x}


def scaled_narrow(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """What overflows in float16 on the rank that has the row lowers the scale of all ranks."""
    runs = []
    for model in (reference, planned):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        runs.append((model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0)))
    scales = []
    for _ in range(12):
        for model, optimizer, scaler in runs:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.scale(model(**inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            stays = [
                torch.equal(*map(whole, p)) for p in zip(before, model.parameters(), strict=True)
            ]
            scales.append((all(stays), scaler.get_scale()))
        assert scales[-1] == scales[-2]
    assert {stays for stays, _ in scales} == {True, False}
    found = dict(planned.named_parameters())
    for name, parameter in reference.named_parameters():
        close(whole(found[name].detach()), parameter.detach(), name, 1e-3)


class Heads(nn.Module):
    """Two results, each of parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def heads() -> models.Case:
    return Heads(), {"x": torch.randn(8, 8)}


def one_of_two(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """Parameters of a result that is not differentiated have no gradient, so none decays."""
    for model in (reference, planned):
        model(**inputs)[0].square().sum().backward()
        assert model.second.weight.grad is None
        assert model.second.bias.grad is None
        torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False).step()
    found = dict(planned.named_parameters())
    for name, parameter in reference.named_parameters():
        close(whole(found[name].detach()), parameter.detach(), name)


def copied(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """A copy, as an average of weights is made from, runs with its own weights."""
    twin = deepcopy(planned)
    with torch.no_grad():
        for model in (reference, planned):
            for parameter in model.parameters():
                parameter.mul_(0.5)
    for model in (reference, planned):
        loss_of(model, inputs).backward()
    compare_gradients(reference, planned)
    assert all(parameter.grad is None for parameter in twin.parameters())
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2)
    reference.zero_grad()
    for model in (reference, twin):
        loss_of(model, inputs).backward()
    compare_gradients(reference, twin)


def _narrowed(parameters: str) -> dict[str, Any]:
    """Options that make parameters whole before they are float16."""
    nodes = {"linear*": "S(0)", **dict.fromkeys(("to_1", "to_2", "to_4", "to_5"), "R")}
    return {"pins": {"parameters": {"*": parameters}, "inputs": {"*": "S(0)"}, "nodes": nodes}}


CASES: dict[str, Callable[[], None]] = {
    **{
        f"gradients {check.__name__}, parameters {name}": Case(options, check)
        for name, options, checks in [
            ("whole", WHOLE, (accumulated, hooked)),
            ("cut", CUT, (asked_for, hooked)),
            ("cut and whole", MIXED, (hooked, scaled)),
            (
                "gathered in checkpoints",
                CUT | {"activation_checkpointing": "always"},
                (accumulated, asked_for, hooked),
            ),
            ("gathered again", CUT | {"reshard_after_forward": "always"}, (accumulated, asked_for)),
        ]
        for check in checks
    },
    "one of two results, parameters whole": Case(HEADS, one_of_two, heads),
    "one of two results, parameters cut": Case(MLP, one_of_two, heads),
    "overflow in float16, parameters whole": Case(_narrowed("I"), scaled_narrow, narrow),
    "overflow in float16, parameters cut": Case(_narrowed("S(0)"), scaled_narrow, narrow),
    "copied, parameters cut": Case(MLP, copied, models.mlp),
}
LONG = (
    "gradients accumulated, parameters gathered in checkpoints",
    "gradients hooked, parameters cut and whole",
    "overflow in float16, parameters whole",
    "one of two results, parameters whole",
    "gradients hooked, parameters cut",
    "gradients hooked, parameters whole",
    "gradients accumulated, parameters gathered again",
    "gradients asked_for, parameters gathered in checkpoints",
)
"""Each check and each way to keep parameters is in one of the others."""
