"""What lies at the edges of pipelines: targets, buffers, gradients that are None, wrong calls."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.cases.pipeline_habits import NUMBER, Habit
from runtime.cases.pipelines import check_gradients
from support.comparison import close, whole
from support.models import Case, mlp
from torch import nn
from torch.nn import functional

from autoshard.errors import PlanError
from autoshard.runtime import parallelize, pipeline

TIME, BATCH, CLASSES = 8, 4, 6


class TimeFirst(nn.Module):
    """Logits of sequences with time as the first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def time_first() -> Case:
    return TimeFirst(), {"x": torch.randn(TIME, BATCH, 8)}


def _cross_entropy(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(result.flatten(0, 1), target.flatten())


def check_time_first_targets(habit: Habit) -> None:
    batch = torch.cat([part["x"] for part in habit.parts], 1)
    target = torch.randint(CLASSES, (TIME, BATCH * NUMBER))
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=_cross_entropy)
    loss = planned.step(x=batch, target=target)
    expected = _cross_entropy(habit.reference(batch), target)
    expected.backward()
    close(loss, expected.detach().double(), "loss")
    check_gradients(planned, habit.reference)


class TwoNames(nn.Module):
    """A counter and a mean with two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(16))
        self.other = nn.Module()
        self.other.register_buffer("mean", self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.5)
        return self.down((y - self.mean).relu()).square().mean()


def check_two_names(habit: Habit) -> None:
    planned = parallelize(habit.model, habit.plan, habit.mesh)
    for _ in range(2):
        losses = []
        habit.reference.zero_grad()
        planned.zero_grad()
        for part in habit.parts:
            losses.append(habit.reference(**part))
            (losses[-1] / NUMBER).backward()
        loss = planned.step(**habit.batch)
        close(loss, torch.stack(losses).detach().mean().double(), "loss")
        check_gradients(planned, habit.reference)
    own = dict(planned.named_buffers(remove_duplicate=False))
    assert len(own) in (0, 2), list(own)
    for name, buffer in own.items():
        close(whole(buffer), habit.reference.get_buffer(name), name)
    state = planned.state_dict()
    for name in own:
        close(whole(state[name]), habit.reference.get_buffer(name), name)


class TwoStages(nn.Module):
    """A buffer with two names, updated in the first and read in the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up.register_buffer("mean", torch.zeros(16))
        self.down.register_buffer("mean", self.up.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        with torch.no_grad():
            self.up.mean.lerp_(y.mean(0), 0.5)
        return self.down(y.relu() - self.down.mean).square().mean()


class Dead(nn.Module):
    """Parameters whose gradients are None: what is received has none."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.side(x)
        y = self.up(x)
        return self.down((y * side.detach() + (side > 0)).relu()).square().mean()


class DeadResult(nn.Module):
    """A result that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.end = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        side = self.side(x)
        y = self.up(x)
        return self.down(y.relu()), self.end(side.relu())


class DeadTied(nn.Module):
    """A parameter that two stages use, without a gradient in both."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x) + self.side(x).detach()
        return self.down(y.relu() + self.side(y).detach()).square().mean()


def check_none(habit: Habit) -> None:
    planned = parallelize(habit.model, habit.plan, habit.mesh)
    torch.stack([habit.reference(**part) for part in habit.parts]).mean().backward()
    planned.step(**habit.batch)
    check_gradients(planned, habit.reference)


def check_none_of_results(habit: Habit) -> None:
    planned = pipeline(
        habit.model, habit.plan, habit.mesh, loss_fn=lambda result, _: result[0].square().mean()
    )
    for part in habit.parts:
        (habit.reference(**part)[0].square().mean() / NUMBER).backward()
    planned.step(**habit.batch)
    check_gradients(planned, habit.reference)


def check_total_norm(habit: Habit) -> None:
    planned = pipeline(
        habit.model, habit.plan, habit.mesh, loss_fn=lambda result, _: result.square().mean()
    )
    planned.step(**habit.batch)
    gradients = [p.grad for p in planned.parameters()]
    with pytest.raises(PlanError, match=r"call model\.clip_grad_norm_"):
        nn.utils.get_total_norm(gradients)


def check_lbfgs(habit: Habit) -> None:
    planned = pipeline(
        habit.model, habit.plan, habit.mesh, loss_fn=lambda result, _: result.square().mean()
    )
    optimizer = torch.optim.LBFGS(planned.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return planned.step(**habit.batch)

    with pytest.raises(PlanError, match="LBFGS"):
        optimizer.step(closure)


class NormTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)).relu()
        return self.last(self.norm(y * 2 + 1).relu()).square().mean()


class NormFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.norm(x)).relu()).square().mean()


def check_deferred(habit: Habit) -> None:
    planned = pipeline(habit.model, habit.plan, habit.mesh, deferred_batch_norm=True)
    for _ in range(2):
        planned.step(**habit.batch)
        habit.reference(**habit.batch)
    for name, buffer in planned.named_buffers():
        close(whole(buffer), habit.reference.get_buffer(name), name)


def check_wrong_type(habit: Habit) -> None:
    planned = pipeline(
        habit.model, habit.plan, habit.mesh, loss_fn=lambda result, _: result.square().mean()
    )
    with pytest.raises(PlanError, match="float64"):
        planned.step(x=habit.batch["x"].double())


def check_loss_errors(habit: Habit) -> None:
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=functional.mse_loss)
    for target in (None, torch.randn(NUMBER * 16, 3), torch.randn(7)):
        with pytest.raises(PlanError):
            planned.step(**habit.batch, target=target)
    planned = pipeline(
        habit.built()[0][0], habit.plan, habit.mesh, loss_fn=lambda result, _: result
    )
    with pytest.raises(PlanError):
        planned.step(**habit.batch)
    planned = pipeline(habit.built()[0][0], habit.plan, habit.mesh, loss_fn=lambda *_: 3.0)
    with pytest.raises(PlanError):
        planned.step(**habit.batch)


def check_copy(habit: Habit) -> None:
    planned = pipeline(
        habit.model, habit.plan, habit.mesh, loss_fn=lambda result, _: result.square().mean()
    )
    copied = deepcopy(planned)
    with torch.no_grad():
        for parameter in planned.parameters():
            parameter.add_(1)
    torch.stack([habit.reference(**p).square().mean() for p in habit.parts]).mean().backward()
    copied.step(**habit.batch)
    check_gradients(copied, habit.reference)
    assert all(p.grad is None for p in planned.parameters())


def check_compiled_step(habit: Habit) -> None:
    planned = pipeline(
        habit.model, habit.plan, habit.mesh, loss_fn=lambda result, _: result.square().mean()
    )
    step = torch.compile(planned.step)
    step(**habit.batch)
    torch.stack([habit.reference(**p).square().mean() for p in habit.parts]).mean().backward()
    check_gradients(planned, habit.reference)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x) + self.shift).relu()).square().mean()


def check_replaced_buffer(habit: Habit) -> None:
    planned = pipeline(habit.model, habit.plan, habit.mesh)
    new = torch.randn(16)
    habit.reference.shift = new
    planned.shift = new.clone()
    torch.stack([habit.reference(**p) for p in habit.parts]).mean().backward()
    try:
        planned.step(**habit.batch)
    except PlanError as error:
        print(dist.get_rank(), error)
        return
    check_gradients(planned, habit.reference)


class Initialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("shift", torch.randn(16))

    def init_weights(self) -> None:
        for one in (self.up, self.down):
            one.reset_parameters()
        self.shift.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x) + self.shift).relu()).square().mean()


def check_init_weights(habit: Habit) -> None:
    with torch.device("meta"):
        model = Initialised()
    planned = pipeline(model, habit.plan, habit.mesh)
    planned.to_empty(device="cpu")
    for module in planned.modules():
        if isinstance(module, nn.Linear) and module.weight is not None:
            torch.manual_seed(0)
            module.reset_parameters()
    if planned.shift is not None:
        planned.shift.fill_(0.5)
    print(
        dist.get_rank(),
        {n: (whole(p).abs().max().item()) for n, p in planned.named_parameters()},
        float(planned.step(**habit.batch)),
    )


def check_sub_meshes(habit: Habit) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "pp"))
    planned = pipeline(
        habit.model, habit.plan, mesh["pp"], loss_fn=lambda result, _: result.square().mean()
    )
    planned.step(**habit.batch)
    for p in habit.parts:
        (habit.reference(**p).square().mean() / NUMBER).backward()
    expected = dict(habit.reference.named_parameters())
    for n, p in planned.named_parameters():
        close(whole(p.grad), expected[n].grad, n)


def check_refused_norms(habit: Habit) -> None:
    with pytest.raises(PlanError, match="deferred_batch_norm: " if habit.mesh.get_coordinate()[0] == 0 else "rank"):
        pipeline(habit.model, habit.plan, habit.mesh, deferred_batch_norm=True)


def _of(kind: type[nn.Module]) -> Any:
    return lambda: (kind(), {"x": torch.randn(8, 8) + torch.randn(1)})


CUT = {"cuts": ("before:down",)}
SHARDED = {
    "pins": {
        "inputs": {"x": "I"},
        "parameters": {"up.weight": "S(0)"},
        "buffers": {"*mean": "S(0)", "*shift": "S(0)"},
    }
}
TIME_PINS = {"pins": {"inputs": {"x": "S(1)"}}}
CASES = {
    "targets along dim 1": Habit(check_time_first_targets, time_first, {**CUT, **TIME_PINS}),
    "buffer with two names": Habit(check_two_names, _of(TwoNames), CUT),
    "buffer with two names, sharded": Habit(check_two_names, _of(TwoNames), {**CUT, "pins": {"inputs": {"x": "I"}, "parameters": {"up.weight": "S(0)"}, "buffers": {"*mean": "S(0)"}}}),
    "buffer in two stages": Habit(check_two_names, _of(TwoStages), CUT),
    "none": Habit(check_none, _of(Dead), CUT),
    "none tied": Habit(check_none, _of(DeadTied), CUT),
    "none of results": Habit(check_none_of_results, _of(DeadResult), CUT),
    "total norm": Habit(check_total_norm, lambda: mlp(batch=16)),
    "LBFGS": Habit(check_lbfgs, lambda: mlp(batch=16)),
    "norm twice": Habit(check_refused_norms, _of(NormTwice), {"cuts": ("before:last",)}),
    "norm first GPipe": Habit(
        check_deferred, _of(NormFirst), {"schedule": "GPipe", "cuts": ("before:last",)}
    ),
    "norm first": Habit(check_deferred, _of(NormFirst), {"cuts": ("before:last",)}),
    "wrong type": Habit(check_wrong_type, lambda: mlp(batch=16)),
    "loss errors": Habit(check_loss_errors, lambda: mlp(batch=16)),
    "deepcopy": Habit(check_copy, lambda: mlp(batch=16)),
    "compile step": Habit(check_compiled_step, lambda: mlp(batch=16)),
    "replaced buffer": Habit(check_replaced_buffer, _of(Shifted), {**CUT, "pins": {"inputs": {"x": "I"}, "parameters": {"up.weight": "S(0)"}, "buffers": {"*shift": "S(0)"}}}),
    "init weights": Habit(check_init_weights, _of(Initialised), {**CUT, "pins": {"inputs": {"x": "I"}, "parameters": {"up.weight": "S(0)"}, "buffers": {"*shift": "S(0)"}}}),
    "sub meshes": Habit(check_sub_meshes, lambda: mlp(batch=16), {}, {"pp": 2}),
}
