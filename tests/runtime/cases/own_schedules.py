"""Schedules of the user's own, for planned stages and for those of `split_model`; idle ranks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.cases.pipeline_cuts import FEATURES, ROWS, Stack, linear
from runtime.cases.pipeline_habits import NUMBER, Habit, check_step
from runtime.cases.pipelines import joined_batch
from support.comparison import close
from support.devices import DEVICE
from support.models import gpt2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleLoopedBFS,
    _PipelineScheduleRuntime,
)

from autoshard import split_model
from autoshard.errors import PlanError
from autoshard.plan import PlanOptions
from autoshard.runtime import pipeline

ORDER = (
    "0F0,0F1,0F2,0F3,2F0,2F1,2F2,2F3,2B1,2B0,2B3,2B2,0B1,0B0,0B3,0B2",
    "1F0,1F1,1F2,1F3,3F0,3F1,3F2,3F3,3B1,3B0,3B3,3B2,1B1,1B0,1B3,1B2",
)
"""Actions of two ranks with two stages each, in an order that no schedule of torch has."""


def check_torchs_class(habit: Habit) -> None:
    """A class of torch's in place of the planned one; the stages are sharded inside."""
    check_step(habit, pipeline(habit.model, habit.plan, habit.mesh, schedule=ScheduleGPipe))


def from_file(stages: Sequence[Any], micro_batches: int, **settings: Any) -> Any:
    """A schedule that torch reads from a CSV file."""
    made = _PipelineScheduleRuntime(list(stages), micro_batches, **settings)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "own.csv"
        path.write_text("\n".join(ORDER) + "\n")
        made._load_csv(str(path))
    return made


def check_order_of_a_file(habit: Habit) -> None:
    """An order of actions that no class of torch has: the last micro-batch is not the last."""
    planned = pipeline(habit.model, habit.plan, habit.mesh, schedule=from_file)
    check_step(habit, planned)


class Unknown(PipelineScheduleSingle):
    """A schedule that does not say in which order it runs micro-batches."""

    def _step_microbatches(self, *_: Any, **__: Any) -> None:
        raise AssertionError("not called")


def check_refused(habit: Habit) -> None:
    """An object that is no schedule, and one of unknown order, are refused on all ranks."""
    for wrong, text in (
        (Unknown, "schedule Unknown does not say in which order"),
        (lambda *_, **__: None, "does not say in which order"),
        (ScheduleLoopedBFS, None),
    ):
        model = habit.built()[0][0]
        if text is None:  # also right for one stage per rank
            check_step(habit, pipeline(model, habit.plan, habit.mesh, schedule=wrong))
            continue
        with pytest.raises(PlanError, match=text):
            pipeline(model, habit.plan, habit.mesh, schedule=wrong)


def check_ranks_beyond_the_mesh(habit: Habit) -> None:
    """Two ranks have the stages; the others are idle, and run the same lines."""
    is_idle = dist.get_rank() >= 2
    losses = torch.stack([habit.reference(**part)["loss"] for part in habit.parts])
    mesh = DeviceMesh(DEVICE, torch.tensor([0, 1]), mesh_dim_names=("pp",))
    if is_idle:
        with pytest.warns(UserWarning, match=r"rank [23] is not part of the device mesh"):
            planned = pipeline(habit.model, habit.plan, mesh)
        assert not list(planned.parameters())
        assert not planned.state_dict()
        assert list(planned) == []
        with pytest.raises(PlanError, match="pipeline stages already"):
            pipeline(planned, habit.plan, mesh)
    else:
        planned = pipeline(habit.model, habit.plan, mesh)
    assert len(planned) == (0 if is_idle else 1)
    for _ in range(2):
        loss = planned.step(**joined_batch(habit.parts))
        if is_idle:
            assert loss is None
        else:
            close(loss, losses.detach().mean().double(), "loss")
    with torch.no_grad():
        assert is_idle <= (planned(**joined_batch(habit.parts)) is None)
    dist.barrier()


def check_stages_of_torch() -> None:
    """`split_model` makes what `PipelineStage` runs: one stage per rank, a skip over all."""
    torch.manual_seed(0)
    model, reference = Stack(linear), Stack(linear)
    reference.load_state_dict(model.state_dict())
    x = torch.randn(NUMBER * ROWS, FEATURES)
    model, reference, x = model.to(DEVICE), reference.to(DEVICE), x.to(DEVICE)
    options = PlanOptions(cuts=tuple(f"before:blocks.{i}" for i in (1, 2, 3)))
    stages = split_model(model, options, (x[:ROWS],))
    rank, device = dist.get_rank(), next(model.parameters()).device
    stage = PipelineStage(stages[rank], rank, len(stages), device)
    losses: list[torch.Tensor] = []
    schedule = Schedule1F1B(stage, NUMBER, loss_fn=lambda loss, _: loss)
    arguments = (x,) if rank == 0 else ()
    target = torch.arange(NUMBER, device=device)
    schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
    expected = torch.stack([reference(part) for part in x.split(ROWS)])
    expected.mean().backward()
    check_summed(stages[rank], reference)
    if rank == 3:
        close(torch.stack(losses).detach(), expected.detach(), "losses")


def check_summed(stage: nn.Module, reference: nn.Module) -> None:
    """Gradients of a stage; those of the layer that two stages have are summed by the user."""
    for name, parameter in reference.named_parameters():
        own = dict(stage.named_parameters()).get(name)
        assert parameter.grad is not None
        given = None if own is None else own.grad
        total = torch.zeros_like(parameter) if given is None else given
        dist.all_reduce(total)
        close(total, parameter.grad, name)


CASES = {
    "a class of torch": Habit(check_torchs_class, partial(gpt2, batch=4)),
    "an order of a file": Habit(
        check_order_of_a_file,
        partial(gpt2, batch=4, layers=4),
        {"stages": 4, "schedule": "LoopedBFS"},
    ),
    "schedules that are refused": Habit(check_refused, partial(gpt2, batch=4)),
    "ranks beyond the mesh": Habit(
        check_ranks_beyond_the_mesh, partial(gpt2, batch=4), axes={"pp": 2}
    ),
    "stages of torch": check_stages_of_torch,
}
