"""What training loops do with a model in pipeline stages, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.cases.pipelines import check_gradients, joined_batch, loss_of
from support.comparison import close, device_mesh, whole
from support.devices import DEVICE
from support.meshes import slow_devices
from support.models import Case, gpt2, graph_of, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from autoshard.checker import check_plan
from autoshard.errors import PlanError
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize, pipeline, rng_step

NUMBER = 4


@dataclass
class Habit:
    """A check of one model in two stages with two ranks each.

    Attributes:
        check: what is checked.
        build: a model with the arguments of a micro-batch.
        options: of the plan.
        axes: of the mesh.
    """

    check: Callable[["Habit"], None]
    build: Callable[[], Case] = lambda: gpt2(batch=4)
    options: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=lambda: {"pp": 2, "dp": 2})
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        case, _ = self.built()
        names = [n for n, x in case[1].items() if isinstance(x, torch.Tensor)]
        options = {
            "stages": 2,
            "schedule": "1F1B",
            "micro_batches": NUMBER,
            "pins": {"inputs": dict.fromkeys(names, "S(0)")},
            **self.options,
        }
        self.plan = make_plan(graph_of(case), slow_devices(**self.axes), PlanOptions(**options))
        assert self.plan.found, self.plan.reason

    def built(self) -> tuple[Case, list[dict[str, Any]]]:
        """The model, and the arguments of all micro-batches."""
        torch.manual_seed(0)
        model, inputs = self.build()
        return (model, inputs), [inputs, *(self.build()[1] for _ in range(NUMBER - 1))]

    def __call__(self) -> None:
        (self.model, self.inputs), self.parts = self.built()
        self.reference, _ = self.built()[0]
        self.batch = joined_batch(self.parts)
        self.mesh = device_mesh(self.plan)
        self.check(self)


def check_loss_function(habit: Habit) -> None:
    """A loss outside of forward, of results that stay sharded, with targets."""
    targets = torch.randn(NUMBER * 16, 64)
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=functional.mse_loss)
    loss, result = planned.step(**habit.batch, target=targets, return_outputs=True)
    parts = [habit.reference(**part) for part in habit.parts]
    expected = torch.stack(
        [functional.mse_loss(x, y) for x, y in zip(parts, targets.chunk(NUMBER), strict=True)]
    ).mean()
    expected.backward()
    close(loss, expected.detach().double(), "loss")
    check_gradients(planned, habit.reference)
    if planned[0].is_last:
        close(whole(result), torch.cat(parts).detach(), "result")
    else:
        assert result is None


def check_sums(habit: Habit) -> None:
    """Without scale_grads, losses are summed; a second step adds to gradients."""
    planned = pipeline(habit.model, habit.plan, habit.mesh, loss_fn=_squares, scale_grads=False)
    for _ in range(2):
        loss = planned.step(**habit.batch)
        expected = torch.stack([habit.reference(**part).square().sum() for part in habit.parts])
        expected.sum().backward()
        close(loss, expected.detach().sum().double(), "loss", 1e-4)
    for name, parameter in planned.named_parameters():
        gradient = habit.reference.get_parameter(name).grad
        assert parameter.grad is not None
        assert gradient is not None
        close(whole(parameter.grad), gradient, name, 1e-4)


def _squares(result: torch.Tensor, target: None) -> torch.Tensor:
    assert target is None
    return result.square().sum()


def check_accumulated_steps(habit: Habit) -> None:
    """Gradients of two steps add up, those of the tied embedding too."""
    planned = parallelize(habit.model, habit.plan, habit.mesh)
    for _ in range(2):
        planned.step(**habit.batch)
        torch.stack([loss_of(habit.reference(**part)) for part in habit.parts]).mean().backward()
    check_gradients(planned, habit.reference)


def check_inference(habit: Habit) -> None:
    """Forward without gradients returns the result of the whole batch on the last stage."""
    planned = parallelize(habit.model, habit.plan, habit.mesh)
    with pytest.raises(PlanError, match=r"call model\.step"):
        planned(**habit.batch)
    with torch.no_grad():
        result = planned(**habit.batch)
        expected = [habit.reference(**part) for part in habit.parts]
    if planned[0].is_last:
        logits = torch.cat([one.logits for one in expected])
        close(result["logits"], logits, "logits")
        loss = torch.stack([one.loss for one in expected]).mean()
        close(result["loss"], loss, "loss")
    else:
        assert result is None
    # A step after forward is a step as before it.
    check_step(habit, planned)


def check_step(habit: Habit, planned: nn.Module) -> None:
    """Loss and gradients of one step."""
    losses = torch.stack([loss_of(habit.reference(**part)) for part in habit.parts])
    losses.mean().backward()
    close(planned.step(**habit.batch), losses.detach().mean().double(), "loss")
    check_gradients(planned, habit.reference)


def check_wrong_calls(habit: Habit) -> None:
    """What would be another computation is refused, and what is right works afterwards."""
    planned = parallelize(habit.model, habit.plan, habit.mesh)
    ids = habit.batch["input_ids"]
    with pytest.raises(PlanError, match="the plan is for 4 micro-batches"):
        planned.step(**habit.batch | {"input_ids": ids[:-1]})
    with pytest.raises(PlanError, match="pass the whole batch, 4 times as large"):
        planned.step(**habit.inputs)
    with pytest.raises(PlanError, match="argument 'use_cache' was False"):
        planned.step(**habit.batch | {"use_cache": True})
    with pytest.raises(PlanError, match="argument 'labels' must be the tensor of the whole batch"):
        planned.step(ids)
    with pytest.raises(PlanError, match=r"which torch\.no_grad"), torch.no_grad():
        planned.step(**habit.batch)
    with pytest.raises(PlanError, match=r"differs between ranks 0 and"):
        planned.step(**habit.batch | {"input_ids": (ids + dist.get_rank()) % 64})
    for move in (planned.to, planned.cuda, planned.half):
        with pytest.raises(PlanError, match="where the device mesh says"):
            move("cpu")
    with pytest.raises(PlanError, match="reduces the gradients"):
        planned.no_sync()
    with pytest.raises(PlanError, match="pipeline stages already"):
        parallelize(planned, habit.plan, habit.mesh)
    assert len(planned) == 1
    assert [stage.stage_index for stage in planned] == [planned[0].stage_index]
    planned.eval()
    planned.train()
    check_step(habit, planned)


def check_other_models(habit: Habit) -> None:
    """A plan for another model, or another mesh, is refused."""
    with pytest.raises(PlanError, match="the plan was made for another model"):
        parallelize(gpt2(batch=4, layers=3)[0], habit.plan, habit.mesh)
    mesh = init_device_mesh(DEVICE, (4,), mesh_dim_names=("dp",))
    with pytest.raises(PlanError, match="the plan is for a mesh with the axis names"):
        parallelize(gpt2(batch=4)[0], habit.plan, mesh)


def check_dropout(habit: Habit) -> None:
    """Masks are those of one device without stages, where each micro-batch is a step."""
    planned = parallelize(habit.model, habit.plan, habit.mesh, seed=5)
    graph = graph_of(habit.built()[0])
    plan = make_plan(graph, slow_devices(one=1))
    assert plan.found
    losses, gradients = dropped_out(habit, plan)
    for expected in losses:
        close(planned.step(**habit.batch), expected, "loss")
    for name, parameter in planned.named_parameters():
        assert parameter.grad is not None
        close(whole(parameter.grad), gradients[name], name)
    assert rng_step(planned).value == 2 * NUMBER
    rng_step(planned).value = 0
    close(planned.step(**habit.batch), losses[0], "loss again")


def dropped_out(habit: Habit, plan: Plan) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of two steps and their gradients, on every rank alone."""
    mesh = init_device_mesh(DEVICE, (4, 1), mesh_dim_names=("copy", "one"))
    model = parallelize(habit.built()[0][0], plan, mesh["one"], seed=5)
    losses = []
    for _ in range(2):
        parts = [loss_of(model(**part)) for part in habit.parts]
        for loss in parts:
            (loss / NUMBER).backward()
        losses.append(torch.stack(parts).detach().mean().double())
    assert losses[0] != losses[1]
    gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients


def check_checkpoints(habit: Habit) -> None:
    """Gradients are the same for all micro-batches that are recomputed, but fewer are."""
    assert all(stage.checkpoints for stage in habit.plan.stages)
    saved = {}
    for mode in ("always", "except_last", "never"):
        model = habit.built()[0][0]
        planned = pipeline(model, habit.plan, habit.mesh, checkpoint=mode)
        counts = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, counts=counts: (counts.append(x.nbytes), x)[1], lambda x: x
        ):
            loss = planned.step(**habit.batch)
        saved[mode] = sum(counts)
        habit.reference.zero_grad()
        losses = torch.stack([loss_of(habit.reference(**part)) for part in habit.parts])
        losses.mean().backward()
        close(loss, losses.detach().mean().double(), "loss")
        check_gradients(planned, habit.reference)
    assert saved["always"] < saved["except_last"] < saved["never"]


class Losses(nn.Module):
    """Linear layers, and the mean of squares as loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def mlp_with_loss(layers: int) -> Case:
    """A model without tied parameters."""
    return Losses(layers), {"x": torch.randn(8, 16)}


class Normalised(nn.Module):
    """A batch norm between linear layers, and the mean of squares as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu()).square().mean()


def normalised() -> Case:
    """A model with a batch norm, of rows whose mean is not zero."""
    return Normalised(), {"x": torch.randn(8, 8) + torch.randn(1)}


def check_deferred_norms(habit: Habit) -> None:
    """Running statistics are those of the whole batch, or of one micro-batch after another."""
    for deferred in (True, False):
        model = habit.built()[0][0]
        planned = pipeline(model, habit.plan, habit.mesh, deferred_batch_norm=deferred)
        reference = habit.built()[0][0]
        for _ in range(2):
            planned.step(**habit.batch)
            for batch in [habit.batch] if deferred else habit.parts:
                reference(**batch)
        for name, buffer in planned.named_buffers():
            close(whole(buffer), reference.get_buffer(name), name)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, [name for name, _ in planned.named_buffers()])
    assert {name for names in held for name in names} == dict(reference.named_buffers()).keys()


def check_split_backward(habit: Habit) -> None:
    """Gradients of parameters are computed in backward of weights, and only there."""
    planned = parallelize(habit.model, habit.plan, habit.mesh)
    assert all(stage.splits_backward for stage in planned)
    for stage in planned:
        stage.backward_weight_one_chunk = lambda *_, **__: None
    planned.step(**habit.batch)
    assert all(parameter.grad is None for parameter in planned.parameters())


def check_evaluation(habit: Habit) -> None:
    """A model is trained with dropout and evaluated without, under two plans."""
    model, inputs = habit.built()[0]
    graph = graph_of((model.eval(), inputs))
    options = {
        "mode": "inference",
        "stages": 2,
        "schedule": "1F1B",
        "micro_batches": NUMBER,
        "pins": habit.plan.state_pins(),
    }
    evaluated, other = (
        make_plan(
            graph,
            slow_devices(**habit.axes),
            PlanOptions(**options | {"cuts": cuts}),
        )
        for cuts in (habit.options["cuts"], ("after:transformer.h.1",))
    )
    assert check_plan(evaluated, graph) == ()
    plans = {"train": habit.plan, "eval": evaluated}
    planned = parallelize(habit.model, plans, habit.mesh)
    for _ in range(2):
        planned.train()
        assert planned.step(**habit.batch) > 0
        planned.zero_grad()
        planned.eval()
        result = planned(**habit.batch)
        with torch.no_grad():
            expected = [habit.reference.eval()(**part).logits for part in habit.parts]
        if planned[0].is_last:
            close(whole(result["logits"]), torch.cat(expected), "logits")
    with pytest.raises(PlanError, match="with the same cuts"):
        parallelize(habit.built()[0][0], {"train": habit.plan, "eval": other}, habit.mesh)


def check_scaler(habit: Habit) -> None:
    """A step of GradScaler is skipped on all ranks if one stage has an infinite gradient."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    scaler.scale(torch.zeros(()))  # a loss is scaled on the ranks of the last stage only
    planned = pipeline(
        habit.model,
        habit.plan,
        habit.mesh,
        loss_fn=lambda result, _: scaler.scale(result.square().mean()),
    )
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
    before = [whole(parameter.detach()).clone() for parameter in planned.parameters()]
    planned.step(**habit.batch)
    if planned[0].is_last:
        next(planned.parameters()).grad.to_local().fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    for one, other in zip(before, planned.parameters(), strict=True):
        close(whole(other.detach()), one, "skipped", 0)
    optimizer.zero_grad()
    planned.step(**habit.batch)
    torch.stack([habit.reference(**p).square().mean() for p in habit.parts]).mean().backward()
    scaler.unscale_(optimizer)
    check_gradients(planned, habit.reference)


CASES = {
    "gradient scaler": Habit(check_scaler, lambda: mlp(batch=16)),
    "evaluation": Habit(
        check_evaluation,
        lambda: gpt2(batch=4, dropout=0.3),
        {"cuts": ("before:transformer.h.1",), "pins": {"parameters": {"*": "I"}}},
    ),
    "split backward": Habit(
        check_split_backward,
        lambda: mlp_with_loss(layers=4),
        {"stages": 4, "schedule": "ZBVZeroBubble"},
    ),
    "deferred batch norm": Habit(check_deferred_norms, normalised),
    "loss function": Habit(check_loss_function, lambda: mlp(batch=16)),
    "sums of losses": Habit(check_sums, lambda: mlp(batch=16)),
    "accumulated steps": Habit(check_accumulated_steps),
    "inference": Habit(check_inference),
    "wrong calls": Habit(check_wrong_calls),
    "other models and meshes": Habit(check_other_models),
    "dropout": Habit(check_dropout, lambda: gpt2(batch=4, dropout=0.3), {"stages": 4}, {"pp": 4}),
    "activation checkpoints": Habit(
        check_checkpoints,
        lambda: gpt2(batch=4, layers=6),
        {"activation_checkpointing": "always", "balance": (3, 3)},
    ),
}
