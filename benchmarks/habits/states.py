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

_EPS = 1e-4
"""Of optimizers that divide by the size of gradients. With the usual 1e-8, gradients that are zero
but for rounding, as of a bias before a mean is subtracted, would become numbers."""

OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "sgd, momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "sgd, loop": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=False),
    "sgd, fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, eps=_EPS),
    "adam, foreach": lambda p: torch.optim.Adam(p, 0.01, eps=_EPS, foreach=True, amsgrad=True),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.01, eps=_EPS, fused=True),
    "adamw, loop": lambda p: torch.optim.AdamW(p, 0.01, eps=_EPS, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, eps=_EPS, momentum=0.9),
    "groups": lambda p: _grouped(list(p)),
}


def _grouped(parameters: list[nn.Parameter]) -> Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "lr": 0.02},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, eps=_EPS)


State = Callable[[Step], Any]
"""Reads or changes gradients, parameters or models."""


def _gradient(s: Step, num_dims: int = 1) -> Tensor:
    """The gradient of a random parameter of the planned models."""
    found = [
        p.grad
        for model in s.parts.planned.values()
        for p in model.parameters()
        if p.grad is not None and p.ndim >= num_dims
    ]
    return s.draw.choice(found or [s.parts.square.detach().clone()])


def _gradient_matrix(s: Step) -> Tensor:
    return _gradient(s, 2)


def _weight(s: Step, num_dims: int = 1) -> nn.Parameter:
    """A random parameter of the planned model."""
    return s.draw.choice([p for p in s.parts.one.parameters() if p.ndim >= num_dims])


def _matrix(s: Step) -> nn.Parameter:
    return _weight(s, 2)


def _on(choose: Callable[[Step], Tensor], change: Callable[[Step, Any], Any]) -> State:
    """What is done to a random tensor."""
    return lambda s: change(s, choose(s))


def _each(choose: Callable[[Step], list[Any]], change: Callable[[Any], Any]) -> State:
    """What is done to all tensors of a kind."""
    return lambda s: [change(x) for x in choose(s)]


def _all(s: Step) -> list[nn.Parameter]:
    return list(s.parts.named().values())


def _weights(s: Step) -> list[nn.Parameter]:
    return list(s.parts.one.parameters())


def _trained(s: Step) -> list[nn.Parameter]:
    return [p for p in _weights(s) if p.grad is not None]


def _gradients(s: Step) -> list[Tensor]:
    return [p.grad for p in _weights(s) if p.grad is not None]


def _norms_at_once(s: Step) -> object:
    gradients = _gradients(s)
    return sum(n**2 for n in torch._foreach_norm(gradients)) if gradients else 0.0  # noqa: SLF001


def _norm_of_all(s: Step) -> Tensor:
    norms = [autoshard.full_tensor(g.norm()) for g in _gradients(s)]
    return torch.linalg.vector_norm(torch.stack(norms or [torch.ones(())]))


READS: dict[str, State] = {
    "norm": _on(_gradient, lambda _, g: autoshard.full_tensor(g.norm()).item()),
    "norm of a kind": _on(
        _gradient, lambda s, g: g.norm(p=s.draw.choice((1, 2, 3, math.inf))).item()
    ),
    "norm along a dim": _on(_gradient_matrix, lambda s, g: g.norm(dim=s.draw.choice((0, 1)))),
    "vector_norm": _on(_gradient, lambda _, g: torch.linalg.vector_norm(g, 1)),
    "mean, maximum": _on(_gradient, lambda _, g: [g.mean().item(), g.abs().max()]),
    "norm of all": _norm_of_all,
    "norms at once": _norms_at_once,
    "finite": _each(_gradients, lambda g: bool(torch.isfinite(g).all())),
    "as a vector": lambda s: nn.utils.parameters_to_vector(_weights(s)).abs().max(),
    "flat": _on(_gradient, lambda _, g: g.flatten().abs().sum()),
    "quantile": _on(_gradient, lambda _, g: g.flatten().quantile(0.3)),
    "sign": _on(_gradient, lambda _, g: (g > 0).sum().item()),
    "product": _on(_gradient_matrix, lambda _, g: (g @ g.T).diagonal()),
    "weights": _each(_weights, lambda p: autoshard.full_tensor(p.detach().norm())),
    "a row of a weight": _on(_matrix, lambda _, p: p.detach()[0]),
    "ratio": _on(_weight, lambda _, p: (p.detach().norm() / (p.detach().abs().max() + 1)).item()),
    "state dict": lambda s: [v.double().sum() for v in s.parts.one.state_dict().values()],
    "a copy": lambda s: [p.detach().sum() for p in deepcopy(s.parts.one).parameters()],
}
"""Numbers of gradients and parameters that are printed."""


def _replace(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad = p.grad * 0.5


GRADIENTS: dict[str, State] = {
    "clip_grad_norm_": lambda s: nn.utils.clip_grad_norm_(_all(s), 0.1),
    "clip_grad_norm_ of the model": lambda s: nn.utils.clip_grad_norm_(_weights(s), 0.05).item(),
    "clip_grad_norm_ of another norm": lambda s: nn.utils.clip_grad_norm_(
        _weights(s), 0.05, s.draw.choice((1.0, math.inf)), foreach=s.draw.choice((True, False))
    ),
    "clip_grad_value_": lambda s: nn.utils.clip_grad_value_(_all(s), 1e-3),
    "scaled": _each(_gradients, lambda g: g.mul_(0.5)),
    "scaled by a tensor": _on(_gradient, lambda s, g: g.mul_(s.parts.scale.detach())),
    "replaced": _each(_trained, _replace),
    "dropped": _on(_weight, lambda _, p: setattr(p, "grad", None)),
    "a row": _on(_gradient, lambda _, g: g[:1].zero_()),
    "some rows": _on(_gradient, lambda _, g: g[:4].mul_(2.0)),
    "a column": _on(_gradient_matrix, lambda _, g: g[:, 0].zero_()),
    "a mask": _on(_gradient, lambda _, g: g.__setitem__(g > 0, 0.0)),
    "a row of a transpose": _on(_gradient_matrix, lambda _, g: g.t()[1].fill_(0.01)),
    "data": _on(_gradient, lambda _, g: g.data[0].zero_()),
    "noise": _on(_gradient, lambda s, g: g.add_(0.01 * s.noise(*g.shape))),
    "centralised": _on(_gradient_matrix, lambda _, g: g.sub_(g.mean(1, keepdim=True))),
    "normalised": _on(_gradient, lambda _, g: g.div_(g.norm() + 1e-3)),
}
"""Changes of gradients after backward; those that return a norm print it."""


Backward = Callable[[Tensor, list[nn.Parameter]], Any]

BACKWARDS: dict[str, Backward] = {
    "twice": lambda loss, _: (loss.backward(retain_graph=True), (0.5 * loss).backward()),
    "of a scaled loss": lambda loss, _: (loss * 8).backward(),
    "with a gradient": lambda loss, _: loss.backward(torch.full_like(loss, 0.5)),
    "of some": lambda loss, ps: loss.backward(inputs=ps),
    "autograd.grad": lambda loss, ps: _given(ps, torch.autograd.grad(loss, ps, allow_unused=True)),
}
"""How gradients are computed; takes the loss and some parameters of the planned model."""


def _given(parameters: list[nn.Parameter], gradients: Iterable[Tensor | None]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def _average(s: Step) -> None:
    """An average of weights, by hand."""
    shadow = {name: p.detach().clone() for name, p in s.parts.one.named_parameters()}
    for name, p in s.parts.one.named_parameters():
        shadow[name].lerp_(p * 1.5, 0.25)
        p.copy_(shadow[name])


def _restored(s: Step) -> None:
    kept = {name: t.clone() for name, t in s.parts.one.state_dict().items()}
    for p in s.parts.one.parameters():
        p.mul_(0.5)
    s.parts.one.load_state_dict(kept)


def _vector(s: Step) -> None:
    vector = nn.utils.parameters_to_vector(_weights(s)) * 0.75
    nn.utils.vector_to_parameters(vector.detach(), _weights(s))


WEIGHTS: dict[str, State] = {
    "a row": _on(_weight, lambda _, p: p[0].fill_(0.25)),
    "a row assigned": _on(_weight, lambda s, p: p.__setitem__(s.draw.randrange(-4, 4), 0.125)),
    "a row of another": _on(_weight, lambda _, p: p.__setitem__(1, p[2] * 2)),
    "a column": _on(_matrix, lambda _, p: p.__setitem__((slice(None), 1), 0.5)),
    "a block": _on(_matrix, lambda _, p: p[1:3, 2:4].add_(1.0)),
    "a mask": _on(_weight, lambda _, p: p.__setitem__(p > 0.1, 0.05)),  # noqa: PLR2004
    "a plain mask": _on(_weight, lambda s, p: p.__setitem__(s.noise(*p.shape) > 0, 0.05)),
    "rows by a list": _on(_weight, lambda _, p: p.__setitem__([0, 3], -0.25)),
    "a row of a plain tensor": _on(_matrix, lambda s, p: p.__setitem__(0, s.noise(*p.shape[1:]))),
    "pruned": _on(_weight, lambda _, p: p.mul_(p.abs() > 0.1)),  # noqa: PLR2004
    "pruned by a plain mask": _on(_weight, lambda s, p: p.mul_(s.noise(*p.shape) > 0)),
    "clamped": _on(_weight, lambda _, p: p.clamp_(-0.2, 0.2)),
    "normalised rows": _on(_matrix, lambda _, p: p.div_(p.norm(dim=1, keepdim=True))),
    "decay": _each(_weights, lambda p: p.mul_(0.9)),
    "decay through data": _each(_weights, lambda p: p.data.mul_(0.9)),
    "data assigned": _on(_weight, lambda _, p: setattr(p, "data", p.data * 0.5)),
    "data, a row": _on(_weight, lambda _, p: p.data[2].zero_()),
    "a row's data": _on(_weight, lambda _, p: p[2].data.zero_()),
    "copied": _on(_weight, lambda s, p: p.copy_(s.noise(*p.shape))),
    "a row of a transpose": _on(_matrix, lambda _, p: p.t()[1].mul_(2.0)),
    "a chain of views": _on(_matrix, lambda _, p: p[1:3].t().unsqueeze(0)[0, 1].fill_(0.5)),
    "a squeezed row": _on(_matrix, lambda _, p: p[:1].squeeze(0).mul_(3.0)),
    "an unsqueezed row": _on(_matrix, lambda _, p: p[3].unsqueeze(0).copy_(torch.ones(1))),
    "a flat view": _on(_weight, lambda _, p: p.view(-1)[3:5].fill_(0.5)),
    "a diagonal": _on(_matrix, lambda _, p: p.diagonal().add_(0.1)),
    "chunks": _on(_matrix, lambda _, p: [part[0].zero_() for part in p.chunk(2)]),
    "narrow": _on(_matrix, lambda _, p: p.narrow(0, 1, 3).mul_(0.5)),
    "index_fill_": _on(_weight, lambda _, p: p.index_fill_(0, torch.tensor([1, 3]), 0.5)),
    "index_add_": _on(
        _weight, lambda s, p: p.index_add_(0, torch.tensor([1, 1]), s.noise(2, *p.shape[1:]))
    ),
    "initialised": _on(_matrix, lambda _, p: nn.init.kaiming_uniform_(p)),
    "initialised, normal": _on(_weight, lambda _, p: nn.init.normal_(p, std=0.1)),
    "initialised, orthogonal": _on(_matrix, lambda _, p: nn.init.orthogonal_(p)),
    "average": _average,
    "restored": _restored,
    "a vector": _vector,
    "sgd by hand": _each(_trained, lambda p: p.add_(p.grad, alpha=-0.1)),
    "sgd through data": _each(_trained, lambda p: p.data.sub_(0.1 * p.grad)),
}
"""Changes of parameters under `no_grad`."""


def _replaced(s: Step) -> None:
    head: Any = s.parts.one.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach() * 2)


def _swapped(s: Step) -> None:
    model: Any = s.parts.one
    old = model.head
    model.head = nn.Linear(old.in_features, old.out_features, dtype=torch.float64)


def _halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _hook_of_gradient(s: Step) -> None:
    for p in _weights(s)[:2]:
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient * 2)


def _hook_of_accumulation(s: Step) -> None:
    for p in _weights(s)[-2:]:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(_halve)


def _doubled(_module: nn.Module, _args: object, out: Any) -> Any:
    return out * 2 if isinstance(out, Tensor) else None


def _zero_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


MODELS: dict[str, State] = {
    "train()": lambda s: s.parts.one.train(),
    "eval()": lambda s: s.parts.one.eval(),
    "eval() of all": lambda s: [model.eval() for model in s.parts.planned.values()],
    "frozen": lambda s: _weight(s).requires_grad_(requires_grad=False),
    "all frozen": lambda s: s.parts.two.requires_grad_(requires_grad=False),
    "unfrozen": lambda s: s.parts.one.requires_grad_(requires_grad=True),
    "to its own type": lambda s: s.parts.one.double().to("cpu"),
    "a parameter replaced": _replaced,
    "a layer replaced": _swapped,
    "what it returns": lambda s: setattr(s.parts.one, "results", "logits"),
    "hooks of gradients": _hook_of_gradient,
    "hooks after accumulation": _hook_of_accumulation,
    "a hook that looks": lambda s: s.parts.one.register_forward_hook(lambda *_: None),
    "a hook that changes": lambda s: s.parts.one.register_forward_hook(_doubled),
    "apply": lambda s: s.parts.one.apply(_zero_bias),
    "an attribute": lambda s: setattr(s.parts.one, "epoch", 3),
    "a deep copy in its place": lambda s: setattr(s.parts, "two", deepcopy(s.parts.two)),
}
"""Changes of whole models."""
