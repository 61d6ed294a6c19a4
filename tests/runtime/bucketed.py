"""What users do with gradients, where collectives of parameters run beside other work."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from runtime.comparison import close, device_mesh, whole
from support import models
from support.meshes import slow_devices
from torch import nn

from autoshard.graph import graph_from_json
from autoshard.plan import Plan, PlanOptions, make_plan
from autoshard.plan.buckets import buckets_of
from autoshard.runtime import parallelize

ROWS = dict.fromkeys(("*.attn", "*.mlp", "*.c_*", "*.ln_*", "lm_head"), "S(0)")
MLP = {"pins": {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}, "nodes": {"*": "S(0)"}}}
HEADS = {"pins": {"parameters": {"*": "I"}, "inputs": {"*": "S(0)"}, "nodes": {"*": "S(0)"}}}
CUT = {"pins": {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}, "nodes": ROWS}}
WHOLE = {"pins": {"parameters": {"*": "I"}, "inputs": {"*": "S(0)"}, "nodes": ROWS}}


@dataclass
class Case:
    """A planned model beside the same model on one device.

    Attributes:
        options: of the plan.
        check: takes the model, the planned one, and what both are called with.
        build: makes the model.
    """

    options: dict[str, Any]
    check: Callable[[nn.Module, nn.Module, dict[str, Any]], None]
    build: Callable[[], models.Case] = models.gpt2
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = models.graph_of(self.build())
        self.plan = make_plan(graph, slow_devices(dp=4), PlanOptions(**self.options))
        stage = self.plan.stages[0]
        assert any(
            len(b.conversions) > 1 for b in buckets_of(stage, graph_from_json(stage.program))
        )

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference, inputs = self.build()
        torch.manual_seed(0)
        planned = parallelize(self.build()[0], self.plan, device_mesh(self.plan))
        self.check(reference, planned, inputs)


def _loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    result = model(**inputs)
    return result.square().sum() if isinstance(result, torch.Tensor) else result["loss"]


def _compare(reference: nn.Module, planned: nn.Module, tolerance: float = 1e-5) -> None:
    found = dict(planned.named_parameters())
    for name, parameter in reference.named_parameters():
        close(whole(found[name].grad), parameter.grad, name, tolerance)


def accumulated(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """Two steps' gradients, then two passes over one graph, add up."""
    for model in (reference, planned):
        for _ in range(2):
            _loss(model, inputs).backward()
        loss = _loss(model, inputs)
        loss.backward(retain_graph=True)
        loss.backward()
    _compare(reference, planned)


def asked_for(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """`torch.autograd.grad` gives what backward adds up, and leaves `grad` alone."""
    given = torch.autograd.grad(_loss(planned, inputs), list(planned.parameters()))
    assert all(parameter.grad is None for parameter in planned.parameters())
    _loss(reference, inputs).backward()
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
            close(whole(_loss(model, inputs)), _loss(reference, inputs), "loss")
        _loss(model, inputs).backward()
    _compare(reference, planned)
    for name, parameter in planned.named_parameters():
        assert torch.equal(seen[name], parameter.grad.to_local()), name
    norms = [
        whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        for model in (reference, planned)
    ]
    close(norms[1], norms[0], "norm")
    _compare(reference, planned)


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


def compiled(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """The planned model is one graph to `torch.compile`, and computes the same."""
    # The tracer makes an object of each function of autograd, which torch itself warns of.
    warnings.filterwarnings("ignore", ".*autograd.function.Function", DeprecationWarning)
    run = torch.compile(planned, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        losses = [_loss(model, inputs) for model in (run, reference)]
        close(whole(losses[0].detach()), losses[1].detach(), "loss")
        for loss in losses:
            loss.backward()
    _compare(reference, planned, 1e-4)


CASES: dict[str, Callable[[], None]] = {
    **{
        f"gradients {check.__name__}, parameters {name}": Case(options, check)
        for name, options, checks in [
            ("whole", WHOLE, (accumulated, hooked)),
            ("cut", CUT, (asked_for, hooked)),
            ("gathered again", CUT | {"reconversion": "always"}, (accumulated, asked_for)),
        ]
        for check in checks
    },
    "one of two results, parameters whole": Case(HEADS, one_of_two, heads),
    "one of two results, parameters cut": Case(MLP, one_of_two, heads),
    "compiled, parameters cut": Case(MLP, compiled, models.mlp),
}
