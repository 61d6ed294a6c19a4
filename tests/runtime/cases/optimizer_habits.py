"""Habits around the optimizer: clipping, optimizers, parameter groups, schedules, averages."""

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from runtime.cases.habits import EXACT, Habit, Loop, adam, batches, gradients, step
from runtime.cases.updated_buffers import MESHES
from support.comparison import whole
from torch import nn
from torch.optim import lr_scheduler, swa_utils

Parameters = Iterable[nn.Parameter]


def clip_norms(model: nn.Module) -> object:
    """Of all kinds, and of one parameter at a time."""
    optimizer, norms = adam(model), []
    options: list[dict[str, Any]] = [
        {},
        {"foreach": True},
        {"foreach": False},
        {"error_if_nonfinite": True},
        {"norm_type": 1.0},
        {"norm_type": math.inf},
    ]
    for batch, chosen in zip(batches(len(options)), options, strict=True):
        optimizer.zero_grad()
        model(**batch).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, **chosen))
        norms += [nn.utils.clip_grad_norm_(p, 0.01).item() for p in model.parameters()]
        optimizer.step()
    return norms, float(norms[0]), bool(norms[0] > 0.1)


def clip_nonfinite(model: nn.Module) -> object:
    """One infinite gradient, on the rank that has its row, is an error on all ranks."""
    model(**batches(1)[0]).backward()
    model.up.weight.grad[-1, 0] = torch.inf
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    except RuntimeError as error:
        return "non-finite" in str(error)
    return False


def clip_values(model: nn.Module) -> object:
    found = []
    for foreach, batch in zip((None, True, False), batches(3), strict=True):
        model.zero_grad()
        model(**batch).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)
        found.append(gradients(model))
    return found


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam, foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True, amsgrad=True),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adamw, loop": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True, amsgrad=True),
    "adamw, tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.01, dtype=torch.float64)),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
}


def optimize(model: nn.Module, names: Iterable[str]) -> object:
    """Steps of one optimizer after the other."""
    found = []
    for name in names:
        optimizer = OPTIMIZERS[name](model.parameters())
        found.append([step(model, optimizer, batch) for batch in batches(3)])
    return found


def adafactor(model: nn.Module) -> object:
    optimizer = torch.optim.Adafactor(model.parameters(), 0.01)
    return [step(model, optimizer, batch) for batch in batches(2)]


def lbfgs(model: nn.Module) -> object:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(**batches(1)[0])
        loss.backward()
        return float(loss.item())

    return [float(optimizer.step(closure)) for _ in range(2)]


class Muon(torch.optim.Optimizer):
    """Orthogonalises the momentum of matrices by Newton-Schulz iterations over all of it."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                update = _orthogonal(momentum) if parameter.ndim == 2 else momentum
                parameter.add_(update, alpha=-group["lr"])


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    wide = matrix.size(0) <= matrix.size(1)
    x = matrix / (matrix.norm() + 1e-7)
    x = x if wide else x.T
    for _ in range(3):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.T


def muon(model: nn.Module) -> object:
    optimizer = Muon(model.parameters())
    return [step(model, optimizer, batch) for batch in batches(3)]


def torch_muon(model: nn.Module) -> object:
    """PyTorch's Muon works in bfloat16, so sums over shards are rounded otherwise."""
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-3)
    return [step(model, optimizer, batch) for batch in batches(3)]


def parameter_groups(model: nn.Module) -> object:
    """No weight decay for biases and norms, by name; other ones by number of dims."""
    named = dict(model.named_parameters())
    kept = {name for name in named if "norm" in name or name.endswith("bias")}
    assert kept == {name for name, parameter in named.items() if parameter.ndim < 2}
    groups = [
        {"params": [p for n, p in named.items() if n not in kept], "weight_decay": 0.5},
        {"params": [p for n, p in named.items() if n in kept], "weight_decay": 0.0, "lr": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return [step(model, optimizer, batch) for batch in batches(3)]


def zero_in_place(model: nn.Module) -> object:
    optimizer = adam(model)
    for batch in batches(3):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None for parameter in model.parameters())
    return gradients(model)


def schedules(model: nn.Module) -> object:
    """OneCycleLR with its momentum, warm-up then cosine, and a plateau of the loss."""
    found = []
    for schedule in (
        lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=4),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)],
            milestones=[2],
        ),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = schedule(optimizer)
        for batch in batches(3):
            loss = step(model, optimizer, batch)
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([loss] if plateau else []))
            found.append((loss, scheduler.get_last_lr()[0]))
    return found


def averaged_model(model: nn.Module) -> object:
    """`AveragedModel`, of the mean and exponential, which runs with its own weights."""
    found = []
    for options in ({}, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True}):
        average = swa_utils.AveragedModel(model, **options)
        optimizer = adam(model)
        for batch in batches(3):
            found.append(step(model, optimizer, batch))
            average.update_parameters(model)
            with torch.no_grad():
                found.append(average(**batch).item())
        found.append(dict(average.module.named_parameters()))
    return found


def average_by_hand(model: nn.Module) -> object:
    """A deep copy, and a dict of tensors that is swapped in for evaluation and out again."""
    optimizer, found = adam(model), []
    copied = deepcopy(model).requires_grad_(requires_grad=False)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for batch in batches(3):
        found.append(step(model, optimizer, batch))
        with torch.no_grad():
            for one, other in zip(copied.parameters(), model.parameters(), strict=True):
                one.mul_(0.9).add_(other, alpha=0.1)
            for name, parameter in model.named_parameters():
                shadow[name].lerp_(parameter, 0.2)
            found.append(copied(**batch).item())
            backup = {name: p.detach().clone() for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.copy_(shadow[name])
            found.append(model(**batch).item())
            for name, parameter in model.named_parameters():
                parameter.data = backup[name]
    return found, dict(copied.named_parameters()), shadow


def optimizer_in_backward(model: nn.Module) -> object:
    """One optimizer per parameter steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    found = []
    for batch in batches(3):
        loss = model(**batch)
        loss.backward()
        found.append(loss.item())
        assert all(parameter.grad is None for parameter in model.parameters())
    return found


def scaled(model: nn.Module) -> object:
    """A gradient that is infinite on the ranks that have its row makes all ranks skip the step."""
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for number, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        scaler.scale(model(**batch)).backward()
        if number == 1:
            model.up.weight.grad[-1, -1] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    return scales


def by_hand(model: nn.Module) -> object:
    """SGD without an optimizer, through the parameter and through `data`."""
    found = []
    for batch in batches(3):
        loss = model(**batch)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
            parameter.data = parameter.data * 0.99
        found.append(loss.item())
    return found


def penalty(model: nn.Module) -> object:
    """A penalty of the parameters in the loss, which is a DTensor."""
    optimizer, found = adam(model), []
    for batch in batches(3):
        optimizer.zero_grad()
        squares = sum(parameter.square().sum() for parameter in model.parameters())
        loss = model(**batch) + 0.01 * squares
        loss.backward()
        optimizer.step()
        found.append(whole(loss).item())
    return found


OTHER_OPTIMIZERS = [n for n in OPTIMIZERS if not n.startswith(("sgd", "adam", "adamw"))]
LOOPS: dict[str, tuple[Loop, float]] = {
    "clip_grad_norm_": (clip_norms, EXACT),
    "clip_grad_norm_ of infinite gradients": (clip_nonfinite, EXACT),
    "clip_grad_value_": (clip_values, EXACT),
    **{
        f"optimizer {kind}": (
            partial(optimize, names=[n for n in OPTIMIZERS if n.partition(",")[0] == kind]),
            EXACT,
        )
        for kind in ("sgd", "adam", "adamw")
    },
    "other optimizers": (partial(optimize, names=OTHER_OPTIMIZERS), 1e-8),
    "LBFGS": (lbfgs, EXACT),
    "Adafactor": (adafactor, 1e-8),
    "muon by hand": (muon, EXACT),
    "torch.optim.Muon": (torch_muon, 1e-2),
    "GradScaler": (scaled, EXACT),
    "parameter groups": (parameter_groups, EXACT),
    "zero_grad in place": (zero_in_place, EXACT),
    "schedules": (schedules, EXACT),
    "AveragedModel": (averaged_model, EXACT),
    "averages by hand": (average_by_hand, EXACT),
    "optimizer in backward": (optimizer_in_backward, EXACT),
    "updates by hand": (by_hand, EXACT),
    "penalty of parameters": (penalty, EXACT),
}
CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": Habit(mesh, loop, tolerance=tolerance)
    for mesh in MESHES
    for name, (loop, tolerance) in LOOPS.items()
}
LONG = tuple(f"torch.optim.Muon, {mesh}" for mesh in MESHES)
"""The same updates are in Muon by hand."""
