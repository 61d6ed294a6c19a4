"""Losses, batches and modes around a compiled planned model, as without a compiler."""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from runtime.cases.habits import (
    LENGTH,
    TOKENS,
    Batch,
    Habit,
    Net,
    Refused,
    adam,
    assert_same,
    batches,
    gradients,
    is_planned,
    unreduced,
)
from support.comparison import device_mesh, whole
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoshard.plan import PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize

Function = Callable[..., Any]


def compiled(model: nn.Module, function: Function, *, fullgraph: bool = False) -> Function:
    """A function that uses a planned model, or is one, compiled; unchanged on one device."""
    if not is_planned(model):
        return function
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


class Logits(Net):
    """Returns the logits, times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids)) * self.scale


class LossAndLogits(Net):
    """Returns both."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.hidden(ids))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def ids_of(batch: Batch) -> torch.Tensor:
    return batch["ids"]


def criterion(logits: torch.Tensor, batch: Batch, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy that ignores some labels."""
    labels = batch["labels"].flatten()
    labels = torch.where(labels % 3 == 0, -100, labels)
    return functional.cross_entropy(logits.flatten(0, 1), labels, reduction=reduction)


def trained(model: nn.Module, loss_of: Function) -> object:
    """Some steps; the losses and the last gradients."""
    optimizer, losses = adam(model), []
    for batch in batches(2):
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients(model)


def further_terms(model: nn.Module) -> object:
    """Terms of a loss that are computed from logits, and an accuracy."""
    run, right = compiled(model, model, fullgraph=True), []

    def loss_of(batch: Batch) -> torch.Tensor:
        loss, logits = run(**batch)
        right.append((logits.argmax(-1) == batch["labels"]).float().mean().item())
        return loss + 0.1 * logits.square().mean() + criterion(logits, batch)

    return trained(model, loss_of), right


def loss_outside(model: nn.Module) -> object:
    run = compiled(model, model, fullgraph=True)
    return trained(model, lambda batch: criterion(run(ids_of(batch)), batch))


def whole_step(model: nn.Module) -> object:
    """One compiled function of forward, loss and backward."""
    # The compiler makes objects of functions of autograd in backward too.
    warnings.filterwarnings("ignore", ".*autograd.function.Function", DeprecationWarning)

    def step(batch: Batch) -> torch.Tensor:
        loss = criterion(model(ids_of(batch)) * 2.0, batch)
        loss.backward()
        return loss.detach()

    run = compiled(model, step)
    return [run(batch).item() for batch in batches(2)], gradients(model)


def compiled_loss(model: nn.Module) -> object:
    """A compiled loss of a model that is not compiled."""
    loss_of = compiled(model, lambda z, batch: criterion(z, batch) + z.softmax(-1).square().mean())
    return trained(model, lambda batch: loss_of(model(ids_of(batch)), batch))


class Scaled(nn.Module):
    """A module around a planned one, with a parameter of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.model(ids) * self.scale).square().mean()


def part_of_module(model: nn.Module) -> object:
    outer = Scaled(model)
    run = compiled(model, outer)
    return trained(model, lambda batch: run(ids_of(batch))), whole(outer.scale.grad)


def compiled_in_place(model: nn.Module) -> object:
    """`model.compile()`, micro-batches under `no_sync`, and a copy of the model."""
    if is_planned(model):
        model.compile(backend="aot_eager", fullgraph=True)
    first, second = batches(2)
    with unreduced(model):
        criterion(model(ids_of(first)), first).backward()
    criterion(model(ids_of(second)), second).backward()
    found = [{name: whole(x).clone() for name, x in gradients(model).items()}]
    copied = deepcopy(model)
    with torch.no_grad():
        model.up.weight.mul_(0.5)
    return found, [one(ids_of(first)).square().mean() for one in (model, copied)]


def other_shapes(model: nn.Module) -> object:
    """Batches of other sizes, one of them that of a rank's own rows."""
    warnings.filterwarnings("ignore", ".*run the unsharded model on every rank")
    run, found = compiled(model, model, fullgraph=True), []
    for size in (8, 6, 2, 8):
        (batch,) = batches(1, size=size)
        model.zero_grad()
        loss = criterion(run(ids_of(batch)), batch, "sum")
        loss.backward()
        found.append((loss.item(), {n: whole(x).clone() for n, x in gradients(model).items()}))
    return found


def modes(model: nn.Module) -> object:
    """Evaluation without gradients, and a checkpoint around the model."""
    run, found = compiled(model, model, fullgraph=True), []
    for batch in batches(2):
        with torch.no_grad():
            found.append((run(ids_of(batch)).argmax(-1) == batch["labels"]).sum().item())
        with torch.inference_mode():
            found.append(criterion(run(ids_of(batch)), batch).item())
        model.zero_grad()
        loss = criterion(checkpoint(run, ids_of(batch), use_reentrant=False), batch)
        loss.backward()
        found.append(loss.item())
    return found, gradients(model)


def state_that_changes(model: nn.Module) -> object:
    run = compiled(model, model, fullgraph=True)
    run(ids_of(batches(1)[0]))
    model.scale = 2.0
    return run(ids_of(batches(1)[0]))


def own_shard(model: nn.Module) -> object:
    logits = compiled(model, model, fullgraph=True)(ids_of(batches(1)[0]))
    return logits.to_local().mean() if is_planned(model) else logits.mean()


def in_one_graph(model: nn.Module) -> object:
    run = compiled(model, lambda ids: model(ids).square().mean(), fullgraph=True)
    return run(ids_of(batches(1)[0]))


def loss_in_one_graph(model: nn.Module) -> object:
    run = compiled(model, lambda logits: logits.square().mean(), fullgraph=True)
    return run(model(ids_of(batches(1)[0])))


@dataclass
class TwoSizes:
    """Plans for two sizes of a batch: each call runs the plan for its size, in either order."""

    def prepare(self) -> None:
        self.plans = {}
        for size in (8, 4):
            ids = torch.zeros(size, LENGTH, dtype=torch.int64)
            graph = graph_of((Logits().double(), {"ids": ids}))
            pins = {"inputs": {"*": "S(0)"}, "parameters": {"*": "S(0)"}}
            options = PlanOptions(pins=pins)
            self.plans[str(size)] = make_plan(graph, slow_devices(a=4), options)

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = Logits().double()
        mesh = device_mesh(self.plans["8"])
        for names in (("8", "4"), ("4", "8")):
            plans = {name: self.plans[name] for name in names}
            planned = parallelize(deepcopy(reference), plans, mesh, other_shapes="error")
            run = torch.compile(planned, backend="aot_eager", fullgraph=True)
            for size in (4, 8, 4):
                ids = torch.arange(size * LENGTH).view(size, LENGTH) % TOKENS
                assert_same(run(ids), reference(ids), f"logits of {size}")


def example() -> dict[str, Any]:
    return {"ids": ids_of(batches(1)[0])}


of_logits: Callable[..., Habit] = partial(Habit, build=Logits, example=example)
refused: Callable[..., Refused] = partial(Refused, build=Logits, example=example)

CASES: Mapping[str, Callable[[], None]] = {
    "terms of logits": Habit("4", further_terms, LossAndLogits),
    "loss outside": of_logits("2x2", loss_outside),
    "whole step": of_logits("4", whole_step),
    "loss compiled": of_logits("2x2", compiled_loss),
    "part of a module": of_logits("4", part_of_module),
    "in place": of_logits("2x2", compiled_in_place),
    "other shapes": of_logits("4", other_shapes),
    "modes": of_logits("2x2", modes),
    "state": refused("4", state_that_changes, match="scale"),
    "own shard": refused("2x2", own_shard, match=r"to_local\(\) of a result"),
    "one graph around": refused("4", in_one_graph, error=Exception, match="leave fullgraph=True"),
    # PyTorch's own error, which names the class.
    "one graph of a loss": refused(
        "2x2", loss_in_one_graph, error=Exception, match="class `GlobalTensor`"
    ),
    "two sizes": TwoSizes(),
}
LONG = ("loss outside", "loss compiled", "part of a module", "modes", "own shard")
"""Compiling takes seconds, and the others run the same parts."""
