"""Edges of pipelines: targets, buffers, gradients that are None, wrong calls."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.cases.pipeline_habits import NUMBER, Habit
from runtime.cases.pipelines import check_gradients, joined_batch
from support.comparison import close, mesh_of_ranks, whole
from support.devices import DEVICE
from support.models import Case, mlp
from support.shared_folder import shared_folder
from torch import nn
from torch.nn import functional

from autoshard.checkpoint import load_checkpoint, save_checkpoint
from autoshard.errors import PlanError
from autoshard.graph import OpaqueModule, export_model, load_graph
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize, pipeline

TIME, BATCH, CLASSES = 8, 4, 6


def _squares(result: torch.Tensor, _target: object) -> torch.Tensor:
    return result.square().mean()


def expected_step(habit: Habit, loss: Callable[[Any], torch.Tensor] = torch.clone) -> torch.Tensor:
    """Gradients of the reference, and the loss of the step."""
    losses = torch.stack([loss(habit.reference(**part)) for part in habit.parts])
    losses.mean().backward()
    return losses.detach().mean().double()


class TimeFirst(nn.Module):
    """Logits of sequences with time as the first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def time_first() -> Case:
    """A model whose batch is dim 1."""
    return TimeFirst(), {"x": torch.randn(TIME, BATCH, 8)}


def _cross_entropy(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(result.flatten(0, 1), target.flatten())


def _last_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(result[-1], target)


def check_time_first_targets(habit: Habit) -> None:
    """Targets are divided where the arguments are, or along the dim that is said."""
    batch = torch.cat([part["x"] for part in habit.parts], 1)
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=_cross_entropy)
    for wrong in (
        torch.randint(CLASSES, (BATCH * NUMBER, TIME)),
        torch.randint(CLASSES, (BATCH * NUMBER,)),
        torch.randint(CLASSES, (BATCH * NUMBER * TIME,)),
    ):
        with pytest.raises(PlanError, match=r"divided along dim 1.* pass target_dim"):
            planned.step(x=batch, target=wrong)
    target = torch.randint(CLASSES, (TIME, BATCH * NUMBER))
    loss = planned.step(x=batch, target=target)
    expected = _cross_entropy(habit.reference(batch), target)
    expected.backward()
    close(loss, expected.detach().double(), "loss")
    check_gradients(planned, habit.reference)
    model, reference = habit.built()[0][0], habit.built()[0][0]
    planned = pipeline(model, habit.plan, habit.mesh, loss_fn=_last_of, target_dim=-1)
    loss = planned.step(x=batch, target=target[0])
    expected = _last_of(reference(batch), target[0])
    expected.backward()
    close(loss, expected.detach().double(), "loss")
    check_gradients(planned, reference)


class TwoNames(nn.Module):
    """A running mean with two names, of which one is the other's module's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up.register_buffer("mean", torch.zeros(16))
        self.down.register_buffer("mean", self.up.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        with torch.no_grad():
            self.up.mean.lerp_(y.mean(0), 0.5)
        return self.down((y - self.down.mean).relu()).square().mean()


def check_two_names(habit: Habit) -> None:
    """A buffer with two names is one, in the model and in checkpoints, where it is at all."""
    planned = parallelize(habit.model, habit.plan, habit.mesh)
    for _ in range(2):
        planned.zero_grad()
        habit.reference.zero_grad()
        close(planned.step(**habit.batch), expected_step(habit), "loss")
        check_gradients(planned, habit.reference)
    own = dict(planned.named_buffers(remove_duplicate=False))
    assert sorted(own) == (["down.mean", "up.mean"] if planned[0].is_first else [])
    assert len({id(buffer) for buffer in own.values()}) == int(planned[0].is_first)
    expected = habit.reference.up.mean
    for name, buffer in own.items():
        close(whole(buffer), expected, name)
        close(whole(planned.state_dict()[name]), expected, name)
    with shared_folder() as folder:
        save_checkpoint(planned, Path(folder) / "saved")
        unsharded = habit.built()[0][0]
        load_checkpoint(unsharded, Path(folder) / "saved")
        close(unsharded.up.mean, expected, "saved")
        close(unsharded.down.mean, expected, "saved")
    planned.load_state_dict(unsharded.state_dict())


class ReadLater(TwoNames):
    """As `TwoNames`; the later stage reads what the earlier one has stored."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        with torch.no_grad():
            self.up.mean.lerp_(y.mean(0), 0.5)
        return (self.down(y.relu()) + self.down.mean[:8]).square().mean()


class Unused(nn.Module):
    """Parameters on both sides of a cut, and in both, that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.end = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        side, y = self.side(x), self.up(x)
        y = self.down(y.relu() + side.detach())
        return {"loss": y.square().mean(), "side": self.end(side.relu()) + self.side(y)}


def check_none(habit: Habit) -> None:
    """Parameters without influence on the loss have no gradient, and keep one that they have."""
    planned = parallelize(habit.model, habit.plan, habit.mesh)
    close(planned.step(**habit.batch), expected_step(habit, lambda x: x["loss"]), "loss")
    check_gradients(planned, habit.reference)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for model in (planned, habit.reference)
    ]
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in planned.named_parameters():
        close(whole(parameter.detach()), habit.reference.get_parameter(name).detach(), name)


def check_none_of_results(habit: Habit) -> None:
    """The results that a loss function uses may change from step to step."""
    used = ["loss"]
    planned = pipeline(
        habit.model,
        habit.plan,
        habit.mesh,
        loss_fn=lambda result, _: sum(result[name].square().mean() for name in used),
    )
    for names in (["loss"], ["side"], ["loss", "side"], ["loss"]):
        used[:] = names
        planned.zero_grad()
        habit.reference.zero_grad()
        expected = expected_step(habit, lambda x: sum(x[n].square().mean() for n in used))
        close(planned.step(**habit.batch), expected, "loss")
        check_gradients(planned, habit.reference)


def check_norms(habit: Habit) -> None:
    """Norms of one rank's stages are refused, and LBFGS; clipping by a norm of all is right."""
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=_squares)
    planned.step(**habit.batch)
    with pytest.raises(PlanError, match=r"call model\.clip_grad_norm_"):
        nn.utils.get_total_norm([parameter.grad for parameter in planned.parameters()])
    expected_step(habit, lambda x: x.square().mean())
    norm = planned.clip_grad_norm_(float("inf"))
    nn.utils.clip_grads_with_norm_(planned.parameters(), 0.1, norm)
    close(norm, nn.utils.clip_grad_norm_(habit.reference.parameters(), 0.1).double(), "norm")
    check_gradients(planned, habit.reference)
    optimizer = torch.optim.LBFGS(planned.parameters())
    with pytest.raises(PlanError, match="LBFGS computes"):
        optimizer.step(lambda: planned.step(**habit.batch))


class NormFirst(nn.Module):
    """A batch norm of the arguments, whose backward keeps its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu()).square().mean()


class NormTwice(NormFirst):
    """One that is used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(self.norm(x) * 2 + 1)).relu()).square().mean()


def check_deferred_norms(habit: Habit) -> None:
    """Running statistics are those of the whole batch, with several micro-batches in flight."""
    planned = pipeline(habit.model, habit.plan, habit.mesh, deferred_batch_norm=True)
    copied = deepcopy(planned)
    for model in (planned, copied):
        reference = habit.built()[0][0]
        for _ in range(2):
            loss = model.step(**habit.batch)
            reference(**habit.batch)
        close(loss, expected_step(habit), "loss")
        for name, buffer in model.named_buffers():
            close(whole(buffer), reference.get_buffer(name), name)


def check_refused_norms(habit: Habit) -> None:
    """A norm that is used twice is refused, and one that export kept whole."""
    opaque = NormFirst()
    archive = export_model(opaque, (), habit.inputs, opaque=[OpaqueModule("norm")])
    options = PlanOptions(micro_batches=NUMBER, cuts=("before:down",))
    plan = make_plan(load_graph(archive), habit.plan.mesh, options)
    for model, one in ((habit.model, habit.plan), (opaque, plan)):
        with pytest.raises(PlanError, match=r"deferred_batch_norm: |rank 0 failed"):
            pipeline(model, one, habit.mesh, deferred_batch_norm=True)


def check_wrong_arguments(habit: Habit) -> None:
    """An error of one rank in the first step is raised on all."""
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=_squares)
    wrong = habit.batch["x"].double()
    with pytest.raises(PlanError, match=r"argument 'x' is torch\.float64"):
        planned.step(wrong)
    own = wrong if dist.get_rank() == dist.get_world_size() - 1 else habit.batch["x"]
    with pytest.raises(PlanError, match=r"torch\.float64|the step did not run: rank 3 failed"):
        planned.step(own)
    with torch.no_grad(), pytest.raises(PlanError, match="float64"):
        planned(wrong)
    planned.step(**habit.batch)
    with pytest.raises(PlanError, match=r"argument 'x' is torch\.float64"):
        planned.step(wrong)
    expected_step(habit, lambda x: x.square().mean())
    check_gradients(planned, habit.reference)


def _not_zero(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if not target.any():
        raise ValueError("a target is zero")
    return functional.mse_loss(result, target)


def check_loss_errors(habit: Habit) -> None:
    """An error of a loss function reaches all ranks, and leaves no gradient."""
    target = torch.randn(NUMBER * 16, 64)
    zeros = torch.cat([target[16:], torch.zeros(16, 64)])
    for loss_fn, wrong, text in (
        (_not_zero, zeros, "ValueError: a target is zero"),
        (_not_zero, None, "the target None: AttributeError"),
        (lambda result, y: (result - y).mean(), torch.randn(NUMBER * 16, 3), "RuntimeError"),
        (lambda result, _: result, target, r"returned a tensor of shape \(16, 64\)"),
        (lambda *_: 3.0, target, r"returned 3\.0"),
        (lambda result, _: result.detach().mean(), target, "with gradients enabled"),
    ):
        planned = pipeline(habit.built()[0][0], habit.plan, habit.mesh, loss_fn=loss_fn)
        shown = text if planned[0].is_last else "the step did not run: rank 2 failed"
        with pytest.raises(PlanError, match=shown):
            planned.step(**habit.batch, target=wrong)
        assert all(parameter.grad is None for parameter in planned.parameters())
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=_not_zero)
    with pytest.raises(PlanError):
        planned.step(**habit.batch, target=zeros)
    planned.step(**habit.batch, target=target)
    functional.mse_loss(habit.reference(joined_batch(habit.parts)["x"]), target).backward()
    check_gradients(planned, habit.reference)


def check_join_errors(habit: Habit) -> None:
    """An error of what joins results reaches all ranks."""
    planned = pipeline(
        habit.model, habit.plan, habit.mesh, loss_fn=_squares, join=lambda parts: parts[9]
    )
    shown = "join failed: IndexError" if planned[0].is_last else "rank 2 failed"
    with torch.no_grad(), pytest.raises(PlanError, match=shown):
        planned(**habit.batch)
    with pytest.raises(PlanError, match=shown):
        planned.step(**habit.batch, return_outputs=True)


def check_copy(habit: Habit) -> None:
    """A copy has weights and gradients of its own, and runs."""
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=_squares)
    expected_step(habit, lambda x: x.square().mean())
    averaged = torch.optim.swa_utils.AveragedModel(planned)
    for copied in (deepcopy(planned), averaged.module):
        with torch.no_grad():
            for parameter in planned.parameters():
                parameter.add_(1)
        copied.step(**habit.batch)
        check_gradients(copied, habit.reference)
        assert all(parameter.grad is None for parameter in planned.parameters())
        with pytest.raises(PlanError, match=r"call model\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(copied.parameters(), 1.0)


def check_compiled_step(habit: Habit) -> None:
    """A compiled step runs uncompiled, and so does one in a compiled function."""
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=_squares)
    expected = expected_step(habit, lambda x: x.square().mean())

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return planned.step(**batch) * 2

    close(torch.compile(planned.step, backend="eager")(**habit.batch), expected, "loss")
    check_gradients(planned, habit.reference)
    close(torch.compile(step, backend="eager")(habit.batch), expected * 2, "loss")
    with torch.no_grad():
        result = torch.compile(planned, backend="eager")(**habit.batch)
        expected = torch.cat([habit.reference(**part) for part in habit.parts])
    if planned[0].is_last:
        close(whole(result), expected, "result")


class Shifted(nn.Module):
    """A buffer that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x) + self.shift).relu()).square().mean()


def check_replaced_buffer(habit: Habit) -> None:
    """A full tensor in place of a sharded buffer is sharded; one that does not fit is refused."""
    planned = pipeline(habit.model, habit.plan, habit.mesh)
    for wrong, text in (
        (torch.randn(8), r"shape \(16,\)"),
        (torch.randn(16).double(), "torch.float64"),
    ):
        if planned[0].is_first:
            copied = deepcopy(planned)
            copied.shift = wrong
            forward = copied[0].forward_program
            with pytest.raises(PlanError, match=f"buffer 'shift' .*{text}"):
                list(forward._inputs(forward._planned, {}))
    new = torch.randn(16)
    habit.reference.shift = new
    planned.shift = new.clone()
    close(planned.step(**habit.batch), expected_step(habit), "loss")
    check_gradients(planned, habit.reference)


def check_to_empty(habit: Habit) -> None:
    """Weights that nothing has initialised since `to_empty` are refused at the first step."""
    with torch.device("meta"):
        model = Shifted()
    planned = pipeline(model, habit.plan, habit.mesh)
    with pytest.raises(PlanError, match=r"call to_empty\(device="):
        planned.to_empty(device="meta")
    planned.to_empty(device=DEVICE)
    if planned[0].is_first:
        planned.up.reset_parameters()
        planned.shift.zero_()
    shown = "rank 2 failed" if planned[0].is_first else r"2 tensors .* such as 'down\.weight'"
    with pytest.raises(PlanError, match=shown):
        planned.step(**habit.batch)
    if planned[0].is_last:
        planned.down.reset_parameters()
    assert planned.step(**habit.batch) > 0


def check_parts_of_a_job(habit: Habit) -> None:
    """Two pipelines run beside each other, each on a part of the ranks."""
    mesh = mesh_of_ranks((2, 2), ("job", "pp"))["pp"]
    planned = pipeline(habit.model, habit.plan, mesh, loss_fn=_squares)
    habit.parts = habit.parts[dist.get_rank() // 2 :] + habit.parts[: dist.get_rank() // 2]
    expected = expected_step(habit, lambda x: x.square().mean())
    for _ in range(2):
        planned.zero_grad()
        close(planned.step(**joined_batch(habit.parts)), expected, "loss")
        check_gradients(planned, habit.reference)


def _of(kind: type[nn.Module]) -> Case:
    return kind(), {"x": torch.randn(8, 8) + torch.randn(1)}


def _edge(
    check: Callable[[Habit], None], kind: type[nn.Module], axis: str = "dp", **options: Any
) -> Habit:
    """A model that is cut before `down`, in stages with two ranks for the batch or the weights."""
    pins: dict[str, Any] = {"inputs": {"x": "S(0)"}}
    if axis == "tp":
        pins = {"inputs": {"x": "I"}, "parameters": {"up.weight": "S(0)"}}
        if kind in (TwoNames, Shifted):
            pins["buffers"] = {"*mean": "S(0)"} if kind is TwoNames else {"shift": "S(0)"}
    given = {"cuts": ("before:down",), "pins": pins, **options}
    return Habit(check, partial(_of, kind), given, {"pp": 2, axis: 2})


MLP = partial(mlp, batch=16)
CASES = {
    "targets along dim 1": Habit(
        check_time_first_targets,
        time_first,
        {"cuts": ("before:down",), "pins": {"inputs": {"x": "S(1)"}}},
    ),
    "buffer with two names, dp": _edge(check_two_names, TwoNames),
    "buffer with two names, tp": _edge(check_two_names, TwoNames, "tp"),
    "buffer that a later stage reads": _edge(check_two_names, ReadLater, cuts=("after:down",)),
    "no gradient, dp": _edge(check_none, Unused),
    "no gradient, tp": _edge(check_none, Unused, "tp", schedule="GPipe"),
    "no gradient of results": _edge(check_none_of_results, Unused),
    "norms and LBFGS": Habit(check_norms, MLP),
    "norms in flight, dp": _edge(check_deferred_norms, NormFirst, schedule="GPipe"),
    "norms in flight, tp": _edge(check_deferred_norms, NormFirst, "tp"),
    "norms that are refused": _edge(check_refused_norms, NormTwice),
    "wrong arguments": Habit(check_wrong_arguments, MLP),
    "errors of a loss function": Habit(check_loss_errors, MLP),
    "errors of join": Habit(check_join_errors, MLP),
    "copies": Habit(check_copy, MLP),
    "compiled steps": Habit(check_compiled_step, MLP),
    "replaced buffer": _edge(check_replaced_buffer, Shifted, "tp"),
    "to_empty": _edge(check_to_empty, Shifted, "tp"),
    "parts of a job": Habit(check_parts_of_a_job, MLP, axes={"pp": 2}),
}
