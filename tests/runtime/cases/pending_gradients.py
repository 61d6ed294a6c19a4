"""Gradients under `no_sync()`: what is pending belongs to `grad`, and goes with it."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from runtime.cases.habits import (
    FEATURES,
    TOKENS,
    Batch,
    Habit,
    Net,
    Pins,
    adam,
    batches,
    gradients,
    unreduced,
)
from runtime.cases.updated_buffers import MESHES
from support.comparison import whole
from torch import nn
from torch.nn import functional


def pend(model: nn.Module, batch: Batch) -> None:
    with unreduced(model):
        model(**batch).backward()


def discarded(model: nn.Module) -> object:
    """`zero_grad`, and `p.grad = None` of some, between micro-batches."""
    first, second, third = batches(3)
    pend(model, first)
    model.zero_grad()
    model(**second).backward()
    found = [{name: whole(g).clone() for name, g in gradients(model).items()}]
    pend(model, third)
    model.zero_grad(set_to_none=False)
    pend(model, first)
    model.up.weight.grad = None
    model.norm.bias.grad = None
    model(**second).backward()
    return [*found, gradients(model)]


def odd_epochs(model: nn.Module) -> object:
    """Accumulation of 2 of an epoch's 5 micro-batches, `zero_grad` at its start."""
    optimizer, losses = adam(model), []
    for _ in range(3):
        optimizer.zero_grad()
        for number, batch in enumerate(batches(5)):
            is_last = number % 2 == 1
            with nullcontext() if is_last else unreduced(model):
                loss = model(**batch)
                loss.backward()
            losses.append(loss.item())
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def stepped(model: nn.Module) -> object:
    """Steps of optimizers while gradients are pending, and micro-batches after them."""
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
        torch.optim.Adam(model.parameters(), lr=1e-2, fused=True),
    ]
    losses = []
    for optimizer in optimizers:
        for batch in batches(3):
            pend(model, batch)
        optimizer.step()
        for batch in batches(2):
            pend(model, batch)
            optimizer.step()
        model(**batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with unreduced(model):
            losses.append(model(**batches(1)[0]).item())
    return losses


def looked_at(model: nn.Module) -> object:
    """Norms, clipping and numbers of gradients that are pending."""
    first, second, third = batches(3)
    pend(model, first)
    found = [p.grad.norm().item() for p in model.parameters()]
    pend(model, second)
    found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    pend(model, second)
    found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False))
    pend(model, third)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    pend(model, first)
    for parameter in model.parameters():
        parameter.grad.clamp_(-1e-3, 1e-3)
    model.up.weight.grad[3] = 0.0
    model.embed.weight.grad.mul_(3.0)
    found.append({name: whole(g).clone() for name, g in gradients(model).items()})
    pend(model, second)
    model(**third).backward()
    return [*found, gradients(model)]


def asked_for(model: nn.Module) -> object:
    """`torch.autograd.grad`, and backward for some parameters, under `no_sync` and after it."""
    first, second, third = batches(3)
    pend(model, first)
    with unreduced(model):
        given = torch.autograd.grad(model(**second), list(model.parameters()))
        model(**third).backward(inputs=[model.up.weight, model.head.weight])
    later = torch.autograd.grad(model(**second), list(model.parameters()))
    model(**first).backward()
    return given, later, gradients(model)


def hooked(model: nn.Module) -> object:
    """Hooks see the gradient of each micro-batch, as without `no_sync`."""
    first, second, third = batches(3)
    pend(model, first)
    seen: dict[str, list[torch.Tensor]] = {"down": [], "head": []}
    handles = [
        model.up.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3)),
        model.down.weight.register_hook(lambda g: seen["down"].append(whole(g).clone())),
        model.head.weight.register_post_accumulate_grad_hook(
            lambda p: seen["head"].append(whole(p.grad).clone())
        ),
    ]
    pend(model, second)
    model(**third).backward()
    for handle in handles:
        handle.remove()
    pend(model, first)
    return seen, gradients(model)


def upon_reduced(model: nn.Module) -> object:
    """Micro-batches after a whole step whose gradients are kept, and with a penalty."""
    first, second, third = batches(3)
    model(**first).backward()
    kept = model.up.weight.grad
    pend(model, second)
    pend(model, third)
    found = [{name: whole(g).clone() for name, g in gradients(model).items()}]
    pend(model, first)
    with unreduced(model):
        penalty = sum(p.square().sum() for p in model.parameters())
        (model(**second) + whole(0.1 * penalty)).backward()
    model(**third).backward()
    return found, kept, gradients(model)


def scaled(model: nn.Module) -> object:
    """A `GradScaler` over pending gradients, of which one is infinite in one step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for number, batch in enumerate(batches(3)):
        with unreduced(model):
            scaler.scale(model(**batch)).backward()
        if number == 1:
            model.down.weight.grad[-1, -1] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def other_shapes(model: nn.Module) -> object:
    """A smaller batch, which runs unsharded, between micro-batches and as the last one."""
    warnings.filterwarnings("ignore", ".*run the unsharded model on every rank")
    first, second = batches(2)
    (small,) = batches(1, size=3)
    pend(model, first)
    pend(model, small)
    model(**second).backward()
    found = [{name: whole(g).clone() for name, g in gradients(model).items()}]
    pend(model, first)
    model(**small).backward()
    return found, gradients(model)


def restored(model: nn.Module) -> object:
    """Weights that are loaded, and changed in place, between the micro-batches of a step."""
    first, second, third = batches(3)
    state = {name: whole(x).clone() for name, x in model.state_dict().items()}
    found = []
    for _ in range(2):
        pend(model, first)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        pend(model, second)
        target = model.state_dict()
        with torch.no_grad():
            for name, x in target.items():
                x.copy_(state[name])
        loss = model(**third)
        loss.backward()
        found.append(loss.item())
    return found, gradients(model)


class TwoLosses(Net):
    """Its first parameter is read twice, and one head by the second loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, TOKENS, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, targets = self.hidden(ids), labels.flatten()
        tied = hidden @ self.embed.weight.T
        own = functional.cross_entropy(tied.flatten(0, 1), targets)
        both = functional.cross_entropy(
            (self.head(hidden) + self.other(hidden)).flatten(0, 1), targets
        )
        return own, both


def unreached(model: nn.Module) -> object:
    """The last micro-batch does not reach all parameters, and the next step begins."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        for batch in batches(2):
            with unreduced(model):
                own, both = model(**batch)
                (own + both).backward()
        own, both = model(**batches(1)[0])
        own.backward()
        losses += [own.item(), both.item()]
        optimizer.step()
        pend_both(model)
        optimizer.zero_grad()
    for batch in batches(2):
        with unreduced(model):
            sum(model(**batch)).backward()
    model(**batches(1)[0])[0].backward()
    return losses, gradients(model)


def pend_both(model: nn.Module) -> None:
    with unreduced(model):
        sum(model(**batches(1)[0])).backward()


def _with_other(pins: Mapping[str, Pins]) -> Mapping[str, Pins]:
    return {
        mesh: {
            **one,
            "parameters": {**one["parameters"], "other.weight": one["parameters"]["head.weight"]},
        }
        for mesh, one in pins.items()
    }


LOOPS: Mapping[str, Callable[[nn.Module], object]] = {
    "discarded": discarded,
    "epochs of 5 micro-batches": odd_epochs,
    "optimizers step": stepped,
    "looked at": looked_at,
    "autograd.grad": asked_for,
    "hooks": hooked,
    "upon reduced ones": upon_reduced,
    "gradient scaler": scaled,
    "other shapes": other_shapes,
    "weights restored": restored,
}
CASES: dict[str, Callable[[], None]] = {}
for _mesh in MESHES:
    CASES.update({f"{name}, {_mesh}": Habit(_mesh, loop) for name, loop in LOOPS.items()})
    CASES[f"unreached, {_mesh}"] = Habit(
        _mesh, unreached, TwoLosses, pins=_with_other(Habit(_mesh, unreached).pins)
    )
