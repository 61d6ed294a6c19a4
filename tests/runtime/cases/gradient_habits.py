"""Habits around gradients: reading and changing them, several losses, frozen parameters."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from runtime.cases.habits import (
    FEATURES,
    Habit,
    Net,
    Refused,
    adam,
    batches,
    gradients,
    step,
    train,
)
from runtime.cases.updated_buffers import MESHES
from support.comparison import whole
from torch import nn
from torch.utils.checkpoint import checkpoint


def read(model: nn.Module) -> object:
    """Norms, sums and flags of gradients and parameters, as tensors and as numbers."""
    model(**batches(1)[0]).backward()
    found: list[Any] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        found += [gradient.norm(), gradient.norm().item(), gradient.data.norm(2).item()]
        found += [gradient.mean().item(), gradient.abs().max().item(), float(gradient.sum())]
        found += [parameter.detach().std().item(), (gradient > 0).sum().item()]
        found += [bool(torch.isfinite(gradient).all()), bool(torch.isnan(gradient).any())]
        assert torch.isfinite(gradient).all()
    norms = [p.grad.norm() for p in model.parameters()]
    found += [torch.stack(norms).norm(), sum(p.grad.square().sum() for p in model.parameters())]
    return found


def changed(model: nn.Module) -> object:
    """Hooks of gradients that change them, then changes in place, of rows, and assignments."""
    hooks = [p.register_hook(lambda g: g.clamp(-1e-3, 1e-3)) for p in model.parameters()]
    losses = train(model)
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    model(**batches(1)[0]).backward()
    model.embed.weight.grad[3] = 0
    model.embed.weight.grad[:2].zero_()
    model.up.weight.grad[:, 5].mul_(2.0)
    model.down.weight.grad = model.down.weight.grad * 0.5
    model.norm.weight.grad.add_(1.0)
    return losses, gradients(model)


def combined_with_plain(model: nn.Module) -> object:
    """Noise on gradients, masks and averages of weights: plain tensors, whole and broadcast."""
    losses = train(model)
    model(**batches(1)[0]).backward()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            noise = noise.to(parameter.device)
            parameter.grad.add_(noise, alpha=0.1)
            parameter.mul_(noise > 0)
            parameter.lerp_(noise[:1], 0.5)
            losses.append(torch.where(noise > 1, parameter, noise).square().sum().item())
            losses.append((noise[-1:] - parameter).norm().item())
    return losses, gradients(model), list(model.parameters())


def several_losses(model: nn.Module) -> object:
    """Sums of losses of two calls, two passes through one graph, and accumulation."""
    first, second = batches(2)
    (model(**first) + 0.5 * model(**second)).backward()
    loss = model(**first)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    for batch in (first, second):
        (model(**batch) / 2).backward()
    found = torch.autograd.grad(model(**first), [model.up.weight, model.norm.bias])
    return found, gradients(model)


def twice_differentiated(model: nn.Module) -> object:
    loss = model(**batches(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph itself
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(whole(gradient).square().sum() for gradient in found).backward()
    return gradients(model)


class Critic(Net):
    """Takes features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x)).square().mean()


def features() -> dict[str, Any]:
    drawn = torch.randn(8, 4, FEATURES, generator=torch.Generator().manual_seed(1))
    return {"x": drawn.double().requires_grad_()}


def gradient_penalty(model: nn.Module) -> object:
    """The norm of the gradient of an input is a part of the loss, as in WGAN-GP."""
    x = features()["x"]
    loss = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + (gradient.norm() - 1) ** 2).backward()
    return gradient, gradients(model)


def transformed(model: nn.Module) -> object:
    both = batches(2)
    ids, labels = (torch.stack([batch[key] for batch in both]) for key in ("ids", "labels"))
    with torch.no_grad():
        return torch.vmap(model)(ids, labels)


def differentiated_by_func(model: nn.Module) -> object:
    batch = batches(1)[0]
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.grad(lambda p: torch.func.functional_call(model, p, kwargs=batch))(parameters)


def functional_call(model: nn.Module) -> object:
    """Other parameters for one call, placed as the model's."""
    parameters = {n: (p.detach() * 0.5).requires_grad_() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, parameters, kwargs=batches(1)[0])
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in parameters.items()}


def frozen_later(model: nn.Module) -> object:
    """Parameters frozen after the plan was applied, then all, then trained again."""
    model.embed.weight.requires_grad_(requires_grad=False)
    model.up.requires_grad_(requires_grad=False)
    found = train(model)
    assert model.embed.weight.grad is None
    assert model.up.weight.grad is None
    model.requires_grad_(requires_grad=False)
    assert not model(**batches(1)[0]).requires_grad
    model.requires_grad_(requires_grad=True)
    return found + train(model)


class Frozen(Net):
    """Has layers that were frozen before the export."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(requires_grad=False)
        self.up.requires_grad_(requires_grad=False)


def unfrozen(model: nn.Module) -> object:
    found = train(model)
    model.requires_grad_(requires_grad=True)
    return found + train(model)


class Adapter(nn.Module):
    """LoRA: a low-rank product beside a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.a = nn.Parameter(0.1 * torch.randn(4, base.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * x @ self.a.T @ self.b.T


class Adapted(Net):
    """Only adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)
        self.up = Adapter(self.up)
        self.down = Adapter(self.down)


ADAPTED = {
    "4": {
        "inputs": {"*": "S(0)"},
        "parameters": {"embed.weight": "S(0)", "*.base.weight": "S(0)", "*.a": "I", "*.b": "S(0)"},
    },
    "2x2": {
        "inputs": {"*": "S(0),R"},
        "parameters": {"up.base.weight": "I,S(0)", "up.a": "S(0),I", "up.b": "I,S(0)"},
    },
}


def adapted(model: nn.Module) -> object:
    losses = train(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"up.a", "up.b", "down.a", "down.b"}
    return losses


class Checkpointed(Net):
    """Recomputes its blocks in backward, one inside of another, and a module."""

    reentrant = False

    def recomputed(self, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return made

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.recomputed(self.block, x)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(ids)
        embedded = embedded + self.recomputed(self.block, embedded)
        return self.recomputed(self.norm, self.recomputed(self.both, embedded))


class CheckpointedReentrant(Checkpointed):
    """In the other way."""

    reentrant = True


def checkpointed(model: nn.Module) -> object:
    """The whole model is recomputed in backward."""
    batch = batches(1)[0]
    loss = checkpoint(model, batch["ids"], batch["labels"], use_reentrant=False)
    loss.backward()
    return loss, gradients(model)


def validated(model: nn.Module) -> object:
    """Training with validation under `no_grad` and `inference_mode`, also in evaluation mode."""
    optimizer, found = adam(model), []
    for batch in batches(3):
        found.append(step(model, optimizer, batch))
        model.eval()
        with torch.no_grad():
            found.append(model(**batch).item())
        with torch.inference_mode():
            found.append(model(**batch).item())
        model.train()
    return found


def accumulated(model: nn.Module) -> object:
    """Without `no_sync`, as on one device."""
    for batch in batches(3):
        (model(**batch) / 3).backward()
    return gradients(model)


HABITS: dict[str, Callable[[str], Habit]] = {
    "reading gradients": lambda mesh: Habit(mesh, read),
    "hooks and changes of gradients": lambda mesh: Habit(mesh, changed),
    "gradients and weights with plain tensors": lambda mesh: Habit(mesh, combined_with_plain),
    "several losses": lambda mesh: Habit(mesh, several_losses),
    "accumulation": lambda mesh: Habit(mesh, accumulated),
    "second derivatives of parameters": lambda mesh: Refused(
        mesh, twice_differentiated, match="differentiate twice", error=RuntimeError
    ),
    "gradient penalty of an input": lambda mesh: Habit(
        mesh,
        gradient_penalty,
        Critic,
        features,
        {
            "4": {"inputs": {"*": "I"}, "parameters": {"up.*": "S(0)", "down.weight": "S(1)"}},
            "2x2": {
                "inputs": {"*": "I,I"},
                "parameters": {"up.*": "I,S(0)", "down.weight": "S(0),S(1)"},
            },
        },
    ),
    "vmap": lambda mesh: Refused(mesh, transformed, match=r"transforms of torch\.func"),
    "torch.func.grad": lambda mesh: Refused(
        mesh, differentiated_by_func, match=r"transforms of torch\.func"
    ),
    "functional_call": lambda mesh: Habit(mesh, functional_call),
    "frozen later": lambda mesh: Habit(mesh, frozen_later),
    "frozen before the export": lambda mesh: Habit(mesh, train, Frozen),
    "trained after a frozen export": lambda mesh: Refused(
        mesh, unfrozen, Frozen, match=r"'embed.weight' requires a gradient now.*freeze some"
    ),
    "LoRA by hand": lambda mesh: Habit(mesh, adapted, Adapted, pins=ADAPTED),
    "checkpoint in the model": lambda mesh: Habit(mesh, train, Checkpointed),
    "reentrant checkpoint in the model": lambda mesh: Habit(mesh, train, CheckpointedReentrant),
    "checkpoint around the model": lambda mesh: Habit(mesh, checkpointed),
    "validation": lambda mesh: Habit(mesh, validated),
}
CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": habit(mesh) for mesh in MESHES for name, habit in HABITS.items()
}
