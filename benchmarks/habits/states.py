"""What training code does to gradients, parameters, models and optimizers."""

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import autoshard
from benchmarks.habits.functions import Step

Parameters = Iterable[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "sgd, momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "sgd, loop": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=False),
    "sgd, fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adam, foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True, amsgrad=True),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adamw, loop": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
    "groups": lambda p: _grouped(list(p)),
}


def _grouped(parameters: list[nn.Parameter]) -> Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "lr": 0.02},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


State = Callable[[Step], Any]
"""Reads or changes gradients or parameters; what it returns is compared."""


def gradient(s: Step, num_dims: int = 1) -> Tensor:
    """The gradient of a random parameter of the planned models."""
    found = [
        p.grad
        for model in s.parts.planned.values()
        for p in model.parameters()
        if p.grad is not None and p.ndim >= num_dims
    ]
    return s.draw.choice(found or [s.parts.square.detach().clone()])


def parameter(s: Step, num_dims: int = 1) -> nn.Parameter:
    """A random parameter of the planned model."""
    return s.draw.choice([p for p in s.parts.one.parameters() if p.ndim >= num_dims])


def _all(s: Step) -> list[nn.Parameter]:
    return list(s.parts.named().values())


def _planned(s: Step) -> list[nn.Parameter]:
    return list(s.parts.one.parameters())


def _gradients(s: Step) -> list[Tensor]:
    return [p.grad for p in _planned(s) if p.grad is not None]


def _index(s: Step, size: int) -> int:
    return s.draw.randrange(-size, size)


READS: dict[str, State] = {
    "norm": lambda s: autoshard.full_tensor(gradient(s).norm()).item(),
    "norm of a kind": lambda s: gradient(s).norm(p=s.draw.choice((1, 2, 3, math.inf))).item(),
    "norm along a dim": lambda s: gradient(s, 2).norm(dim=s.draw.choice((0, 1))),
    "vector_norm": lambda s: torch.linalg.vector_norm(gradient(s), 1),
    "mean, maximum": lambda s: [gradient(s).mean().item(), gradient(s).abs().max()],
    "norm of all": lambda s: torch.linalg.vector_norm(
        torch.stack([autoshard.full_tensor(g.norm()) for g in _gradients(s)] or [torch.ones(())])
    ),
    "norms at once": lambda s: sum(n**2 for n in torch._foreach_norm(_gradients(s)))  # noqa: SLF001
    if _gradients(s)
    else 0,
    "finite": lambda s: [bool(torch.isfinite(g).all()) for g in _gradients(s)],
    "as a vector": lambda s: nn.utils.parameters_to_vector(_planned(s)).abs().max(),
    "flat": lambda s: gradient(s).flatten().abs().sum(),
    "quantile": lambda s: gradient(s).flatten().quantile(0.3),
    "sign": lambda s: (gradient(s) > 0).sum().item(),
    "product": lambda s: (lambda g: (g @ g.T).diagonal())(gradient(s, 2)),
    "weights": lambda s: [autoshard.full_tensor(p.detach().norm()) for p in _planned(s)],
    "weights by rows": lambda s: parameter(s, 2).detach()[0],
    "ratio": lambda s: (lambda p: (p.detach().norm() / (p.detach().abs().max() + 1)).item())(
        parameter(s)
    ),
    "state dict": lambda s: [v.double().sum() for v in s.parts.one.state_dict().values()],
    "a copy": lambda s: [p for p in deepcopy(s.parts.one).parameters()],  # noqa: C416
}
"""Numbers of gradients and parameters that are printed."""

GRADIENTS: dict[str, State] = {
    "clip_grad_norm_": lambda s: nn.utils.clip_grad_norm_(_all(s), 0.1),
    "clip_grad_norm_ of the model": lambda s: nn.utils.clip_grad_norm_(_planned(s), 0.05).item(),
    "clip_grad_norm_ of another norm": lambda s: nn.utils.clip_grad_norm_(
        _planned(s), 0.05, norm_type=s.draw.choice((1.0, math.inf)), foreach=s.draw.choice((True, False))
    ),
    "clip_grad_value_": lambda s: nn.utils.clip_grad_value_(_all(s), 1e-3),
    "scaled": lambda s: [g.mul_(0.5) for g in _gradients(s)] and None,
    "scaled by a tensor": lambda s: gradient(s).mul_(s.parts.scale.detach()).sum(),
    "replaced": lambda s: [_replace(p) for p in _planned(s)] and None,
    "dropped": lambda s: setattr(parameter(s), "grad", None),
    "a row": lambda s: gradient(s)[:1].zero_().sum(),
    "some rows": lambda s: gradient(s)[:4].mul_(2.0).sum(),
    "a column": lambda s: gradient(s, 2)[:, 0].zero_().sum(),
    "a mask": lambda s: (lambda g: g.__setitem__(g > 0, 0.0))(gradient(s)),
    "transposed": lambda s: gradient(s, 2).t()[1].fill_(0.01).sum(),
    "data": lambda s: gradient(s).data[0].zero_().sum(),
    "noise": lambda s: (lambda g: g.add_(0.01 * s.noise(*g.shape)).sum())(gradient(s)),
    "centralised": lambda s: (lambda g: g.sub_(g.mean(1, keepdim=True)).sum())(gradient(s, 2)),
    "normalised": lambda s: (lambda g: g.div_(g.norm() + 1e-3).sum())(gradient(s)),
}
"""Changes of gradients after backward."""


def _replace(p: nn.Parameter) -> None:
    if p.grad is not None:
        p.grad = p.grad * 0.5


@torch.no_grad()
def _average(s: Step) -> object:
    """An average of weights, by hand."""
    shadow = {name: p.detach().clone() for name, p in s.parts.one.named_parameters()}
    for name, p in s.parts.one.named_parameters():
        shadow[name].lerp_(p * 1.5, 0.25)
        p.copy_(shadow[name])
    return None


def _restored(s: Step) -> None:
    kept = {name: t.clone() for name, t in s.parts.one.state_dict().items()}
    with torch.no_grad():
        for p in s.parts.one.parameters():
            p.mul_(0.5)
    s.parts.one.load_state_dict(kept)


def _data(p: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    p.data = change(p.data)


def _vector(s: Step) -> None:
    vector = nn.utils.parameters_to_vector(_planned(s)) * 0.75
    nn.utils.vector_to_parameters(vector.detach(), _planned(s))


WEIGHTS: dict[str, State] = {
    "a row": lambda s: parameter(s)[0].fill_(0.25).sum(),
    "a row assigned": lambda s: parameter(s).__setitem__(_index(s, 4), 0.125),
    "a row of another": lambda s: (lambda p: p.__setitem__(1, p[2] * 2))(parameter(s)),
    "a column": lambda s: parameter(s, 2).__setitem__((slice(None), 1), 0.5),
    "a block": lambda s: parameter(s, 2)[1:3, 2:4].add_(1.0).sum(),
    "a mask": lambda s: (lambda p: p.__setitem__(p > 0.1, 0.05))(parameter(s)),
    "a plain mask": lambda s: (lambda p: p.__setitem__(s.noise(*p.shape) > 0, 0.05))(parameter(s)),
    "rows by a list": lambda s: parameter(s).__setitem__([0, 3], -0.25),
    "a row of a plain tensor": lambda s: (lambda p: p.__setitem__(0, s.noise(*p.shape[1:])))(
        parameter(s, 2)
    ),
    "pruned": lambda s: (lambda p: p.mul_(p.abs() > 0.1).sum())(parameter(s)),
    "pruned by a plain mask": lambda s: (lambda p: p.mul_(s.noise(*p.shape) > 0).sum())(
        parameter(s)
    ),
    "clamped": lambda s: parameter(s).clamp_(-0.2, 0.2).sum(),
    "normalised rows": lambda s: (lambda p: p.div_(p.norm(dim=1, keepdim=True)).sum())(
        parameter(s, 2)
    ),
    "decay": lambda s: [p.mul_(0.9) for p in _planned(s)] and None,
    "decay through data": lambda s: [p.data.mul_(0.9) for p in _planned(s)] and None,
    "data assigned": lambda s: _data(parameter(s), lambda t: t * 0.5),
    "data, a row": lambda s: parameter(s).data[2].zero_().sum(),
    "a row's data": lambda s: parameter(s)[2].data.zero_().sum(),
    "copied": lambda s: (lambda p: p.copy_(s.noise(*p.shape)).sum())(parameter(s)),
    "a transposed row": lambda s: parameter(s, 2).t()[1].mul_(2.0).sum(),
    "a chain of views": lambda s: parameter(s, 2)[1:3].t().unsqueeze(0)[0, 1].fill_(0.5).sum(),
    "a squeezed row": lambda s: parameter(s, 2)[:1].squeeze(0).mul_(3.0).sum(),
    "an unsqueezed row": lambda s: parameter(s, 2)[3].unsqueeze(0).copy_(torch.ones(1)).sum(),
    "a flat view": lambda s: parameter(s).view(-1)[3:5].fill_(0.5).sum(),
    "a diagonal": lambda s: parameter(s, 2).diagonal().add_(0.1).sum(),
    "chunks": lambda s: [part[0].zero_() for part in parameter(s, 2).chunk(2)] and None,
    "narrow": lambda s: parameter(s, 2).narrow(0, 1, 3).mul_(0.5).sum(),
    "index_fill_": lambda s: parameter(s).index_fill_(0, torch.tensor([1, 3]), 0.5).sum(),
    "index_add_": lambda s: (
        lambda p: p.index_add_(0, torch.tensor([1, 1]), s.noise(2, *p.shape[1:])).sum()
    )(parameter(s)),
    "initialised": lambda s: nn.init.kaiming_uniform_(parameter(s, 2)).sum(),
    "initialised, normal": lambda s: nn.init.normal_(parameter(s), std=0.1).sum(),
    "initialised, orthogonal": lambda s: nn.init.orthogonal_(parameter(s, 2)).sum(),
    "average": _average,
    "restored": _restored,
    "a vector": _vector,
    "sgd by hand": lambda s: [p.add_(p.grad, alpha=-0.1) for p in _planned(s) if p.grad is not None]
    and None,
    "sgd through data": lambda s: [
        p.data.sub_(0.1 * p.grad) for p in _planned(s) if p.grad is not None
    ]
    and None,
}
"""Changes of parameters under `no_grad`."""


def _freeze(s: Step) -> None:
    parameter(s).requires_grad_(requires_grad=False)


def _replaced(s: Step) -> None:
    head = s.parts.one.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach() * 2)  # type: ignore[union-attr]


def _swap(s: Step) -> None:
    old = s.parts.one.get_submodule("head")
    new = nn.Linear(old.in_features, old.out_features, dtype=torch.float64)  # type: ignore[arg-type]
    s.parts.one.head = new  # type: ignore[assignment]


MODELS: dict[str, State] = {
    "train()": lambda s: s.parts.one.train() and None,
    "eval()": lambda s: s.parts.one.eval() and None,
    "eval() of both": lambda s: [model.eval() for model in s.parts.planned.values()] and None,
    "frozen": _freeze,
    "all frozen": lambda s: s.parts.two.requires_grad_(requires_grad=False) and None,
    "unfrozen": lambda s: s.parts.one.requires_grad_(requires_grad=True) and None,
    "to its own type": lambda s: s.parts.one.double().to("cpu") and None,
    "a parameter replaced": _replaced,
    "a layer replaced": _swap,
    "the results": lambda s: setattr(s.parts.one, "results", "logits"),
    "a hook of a parameter": lambda s: (
        lambda p: p.register_hook(lambda g: g * 2) and None if p.requires_grad else None
    )(parameter(s)),
    "a hook after accumulation": lambda s: (
        lambda p: p.register_post_accumulate_grad_hook(_halve) and None if p.requires_grad else None
    )(parameter(s)),
    "a hook of the model": lambda s: s.parts.one.register_forward_hook(lambda *_: None) and None,
    "a hook of the model that changes": lambda s: s.parts.one.register_forward_hook(
        lambda _m, _a, out: out * 2 if isinstance(out, Tensor) else None
    )
    and None,
    "apply": lambda s: s.parts.one.apply(_zero_bias) and None,
    "an attribute": lambda s: setattr(s.parts.one, "epoch", 3),
    "deep copy in its place": lambda s: setattr(s.parts, "two", deepcopy(s.parts.two)),
    "another loop's name": lambda s: setattr(s.parts.one, "name", "x"),
}
"""Changes of whole models."""


def _halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _zero_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
