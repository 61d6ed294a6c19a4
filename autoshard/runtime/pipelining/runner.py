"""Runs the steps of a pipeline: the stages of this rank under the schedule of the plan."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cached_property
from inspect import Signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import AutoshardError, PlanError
from autoshard.plan import Plan
from autoshard.plan.document import Transfer
from autoshard.report.requirements import several_losses
from autoshard.runtime.checks.agreement import raised_on_all_ranks
from autoshard.runtime.checks.call_checks import check_no_transform, compare_over_ranks
from autoshard.runtime.pipelining.devices import StageDevices
from autoshard.runtime.pipelining.differentiated import DifferentiatedParameters
from autoshard.runtime.pipelining.losses import Losses, LossFunction
from autoshard.runtime.pipelining.micro_batches import Join, MicroBatchSplitter, join_results
from autoshard.runtime.pipelining.norms import join_stages
from autoshard.runtime.pipelining.routes import Route, TransferEnd
from autoshard.runtime.pipelining.schedules import (
    SPLIT,
    MakeSchedule,
    last_backward,
    make_schedule,
)
from autoshard.runtime.pipelining.stage import CutValue, ScheduledStage, StageStep
from autoshard.runtime.pipelining.stage_forward import Checkpointing, MicroBatch, StageForward
from autoshard.runtime.pipelining.tied import TiedParameters
from autoshard.runtime.pipelining.uninitialised import check_initialised
from autoshard.runtime.planned_forward import RngStep
from autoshard.runtime.recorder import not_recorded


class PipelineRunner:
    """Runs steps of a plan with several stages.

    Args:
        model: the model, whose parameters are those of this rank's stages.
        plan: the plan.
        devices: of the stages.
        forwards: the programs of this rank's stages.
        signature: signature of the model's forward.
        steps: index of the next micro-batch, for random numbers.
        check_state: checks the Python state of the model, or of a copy of it, before a step.
        loss_fn: the loss of a micro-batch; None if forward returns it.
        target_dim: the dim along which targets are divided; None for that of the arguments.
        scale_grads: True if the loss of a step is the mean of those of micro-batches, False if it
            is their sum.
        checkpoint: for which micro-batches the planned activation checkpoints run.
        join: joins the results of micro-batches; None for the default.
        schedule: makes a schedule in place of the planned one.

    Attributes:
        stages: of this rank.
        tied: parameters that several stages hold.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        devices: StageDevices,
        forwards: Sequence[StageForward],
        *,
        signature: Signature,
        steps: RngStep,
        check_state: Callable[[nn.Module], None],
        loss_fn: LossFunction | None,
        target_dim: int | None,
        scale_grads: bool,
        checkpoint: Checkpointing,
        join: Join | None,
        schedule: MakeSchedule | None,
    ) -> None:
        assert plan.pipeline is not None
        self._plan = plan
        self._settings: dict[str, Any] = {
            "signature": signature,
            "check_state": check_state,
            "loss_fn": loss_fn,
            "target_dim": target_dim,
            "scale_grads": scale_grads,
            "checkpoint": checkpoint,
            "join": join,
            "schedule": schedule,
        }
        self._model = model
        self._check_state = check_state
        self.devices = devices
        self.steps = steps
        self._join = join
        self._checkpoint = checkpoint
        self._batches = MicroBatchSplitter(plan.pipeline, signature, target_dim)
        splits = len(devices.positions) > 1 and (
            schedule is not None or plan.pipeline.schedule in SPLIT
        )
        self.stages = _stages(model, plan, devices, forwards, splits=splits)
        self.is_training = plan.options.mode == "training"
        self._loss_position = -1
        if self.is_training and loss_fn is None:
            self._loss_position = self._find_loss()
        scale = 1 / plan.pipeline.micro_batches if scale_grads else 1.0
        self._losses = Losses(loss_fn, self._loss_position, scale)
        self._schedule = make_schedule(
            plan.pipeline,
            devices,
            self.stages,
            self._loss if self.is_training else None,
            schedule,
        )
        self.tied = TiedParameters(plan, devices, model)
        join_stages(model, devices)
        self._compared: set[tuple[Any, ...]] = set()
        self._agreed: set[bool] = set()  # True when a training step has run, False for inference

    def __deepcopy__(self, memo: dict[int, Any]) -> "PipelineRunner":
        """Run the stages of a copy of the model, with the messages and groups of the original."""
        return PipelineRunner(
            deepcopy(self._model, memo),
            self._plan,
            self.devices,
            [deepcopy(stage.forward_program, memo) for stage in self.stages],
            steps=deepcopy(self.steps, memo),
            **self._settings,
        )

    @cached_property
    def _differentiated(self) -> DifferentiatedParameters:
        """The parameters that results depend on, which training asks for."""
        return DifferentiatedParameters(self._plan)

    @property
    def _last(self) -> ScheduledStage | None:
        """The last stage, if this rank has it."""
        return next((stage for stage in self.stages if stage.is_last), None)

    def _find_loss(self) -> int:
        """Position of the loss among the results of forward.

        Raises:
            PlanError: it cannot be found.
        """
        found = self._differentiated.scalars
        if len(found) != 1:
            raise PlanError(several_losses(len(found)))
        return found[0]

    def _loss(self, results: Sequence[Any], number: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch as it is differentiated; the schedule calls this."""
        last = self._last
        assert last is not None
        if not last.has_backward:
            return number
        return self._losses.of(results, last.forward_program.nest, int(number))

    def train(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, target: Any, keeps: bool
    ) -> tuple[torch.Tensor, Any]:
        """Run forward and backward of all micro-batches.

        Args:
            args: positional arguments of the whole batch.
            kwargs: those by name.
            target: for the loss function.
            keeps: True to return the result of forward.

        Returns:
            The loss, on all ranks; the result of forward on the ranks of the last stage, or None.
        """
        if not torch.is_grad_enabled():
            raise PlanError("step() computes gradients, which torch.no_grad() turns off")
        with self._on_all_ranks(training=True):
            leaves = self._begin(args, kwargs, keeps=keeps)
            targets = self._batches.split_target(target, leaves)
        self._compare(leaves)
        check_initialised(self._model, self.devices.whole)
        self._losses.begin_step(targets, puts_off=True not in self._agreed)
        absent = self._without_gradient()
        with self.tied.summing():
            self._run(self._schedule.step)
        try:
            with self._on_all_ranks(training=True):
                self._losses.end_step()
                result = self._result(leaves) if keeps else None
        except AutoshardError:
            _forget(absent.values())
            raise
        self._agreed.add(True)
        loss, used = self._mean_loss()
        names = self._differentiated.without_gradient(used)
        _forget(parameter for name, parameter in absent.items() if name in names)
        return loss, result

    def _without_gradient(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank that have no gradient now."""
        parameters = self._model.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in parameters if parameter.grad is None}

    def _on_all_ranks(self, *, training: bool) -> AbstractContextManager[None]:
        """A context whose error is raised on all ranks, in the first step.

        Afterwards, the ranks do not wait for each other: the same call is wrong on all.
        """
        if training in self._agreed:
            return nullcontext()
        return raised_on_all_ranks(self.devices.whole, "the step did not run")

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if the plan is for these arguments."""
        try:
            self._batches.split(self._batches.flatten(args, kwargs))
        except PlanError:
            return False
        return True

    def infer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run forward of all micro-batches without gradients.

        Returns:
            The result of forward on the ranks of the last stage; None on others.
        """
        with self._on_all_ranks(training=False):
            leaves = self._begin(args, kwargs, keeps=True)
        self._compare(leaves)
        check_initialised(self._model, self.devices.whole)
        with torch.no_grad():
            self._run(self._schedule.eval)
            with self._on_all_ranks(training=False):
                result = self._result(leaves)
        self._agreed.add(False)
        return result

    def _run(self, run: Callable[..., Any]) -> None:
        number = self._batches.number
        norms = [norms for s in self.stages if (norms := s.forward_program.norms) is not None]
        for one in norms:
            one.begin_step()
        try:
            # The target of a micro-batch is its number; the arguments are in the stages.
            run(target=torch.arange(number) if self.is_training else None, return_outputs=False)
            for stage in self.stages:
                stage.end_step()
            for one in norms:
                one.end_step()
        except BaseException:
            for stage in self.stages:
                stage.forward_program.accumulation.clear()
            raise
        finally:
            self.steps.value += number
            for stage in self.stages:
                stage.clear_runtime_states()

    def _begin(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, keeps: bool) -> list[Any]:
        """Give the stages the arguments of a step; the flat arguments of the whole batch."""
        leaves = self._batches.flatten(args, kwargs)
        parts = self._batches.split(leaves)
        check_no_transform()
        self._check_state(self._model)
        for stage in self.stages:
            names = stage.forward_program.argument_names
            stage.step = StageStep(
                arguments=[[part[name] for name in names] for part in parts],
                micro_batches=self._micro_batches(stage),
                keeps_results=keeps,
            )
        return leaves

    def _micro_batches(self, stage: ScheduledStage) -> list[MicroBatch]:
        number, base = self._batches.number, self.steps.value
        reduced = last_backward(self._schedule, stage)
        return [
            MicroBatch(
                step=base + i,
                waits=i != reduced,
                keeps=i != number - 1,
                checkpoints=self._checkpoint == "always"
                or (self._checkpoint == "except_last" and i != number - 1),
            )
            for i in range(number)
        ]

    def _compare(self, leaves: Sequence[Any]) -> None:
        """Compare the arguments of all ranks, once for each set of shapes."""
        named = self._batches.named(leaves)
        tensors = [(name, x, "all") for name, x in named if isinstance(x, torch.Tensor)]
        shapes = tuple(x.shape for _, x, _ in tensors)
        if tensors and shapes not in self._compared:
            self._compared.add(shapes)
            compare_over_ranks(tensors, self.devices.whole)

    def _mean_loss(self) -> tuple[torch.Tensor, Collection[int]]:
        """The loss of the step on all ranks, and positions of the results that it depends on.

        The first rank of the last stage sends them.
        """
        results = self._differentiated.results
        loss = self._losses.total(self.devices.whole.device_type)
        uses = [float(position in self._losses.used) for position in results]
        sent = torch.cat([loss.reshape(1), loss.new_tensor(uses)])
        with not_recorded():
            dist.broadcast(sent, self.devices.ranks[-1][0], self.devices.group)
        if self._loss_position >= 0:
            return sent[0], (self._loss_position,)
        if len(results) == 1:
            return sent[0], results
        return sent[0], [n for n, use in zip(results, sent[1:].tolist(), strict=True) if use]

    def _result(self, leaves: Sequence[Any]) -> Any:
        last = self._last
        if last is None:
            return None
        results, last.step.results = last.step.results, []
        if self._join is None:
            return join_results(results, self._batches.divided(leaves))
        try:
            return self._join(results)
        except AutoshardError:
            raise
        except Exception as error:
            raise PlanError(f"join failed: {type(error).__name__}: {error}") from error


def _forget(parameters: Iterable[nn.Parameter]) -> None:
    """Let parameters have no gradient."""
    for parameter in parameters:
        parameter.grad = None


def _stages(
    model: nn.Module,
    plan: Plan,
    devices: StageDevices,
    forwards: Sequence[StageForward],
    *,
    splits: bool,
) -> list[ScheduledStage]:
    """This rank's stages."""
    assert plan.pipeline is not None
    links = [
        [_link(one, plan, devices, number) for one in transfers]
        for number, transfers in enumerate(plan.pipeline.transfers)
    ]
    position = devices.position, len(devices.positions)
    stages = []
    for number, forward in zip(devices.own_stages, forwards, strict=True):
        sent = [o.name for o in forward.program.graph.outputs if o.sent]
        outgoing = {link.value: link for link in links[number]} if number < len(links) else {}
        stage = ScheduledStage(
            model,
            forward,
            index=number,
            num_stages=len(plan.stages),
            position=position,
            incoming=links[number - 1] if number else (),
            outgoing=[outgoing[name] for name in sent if name is not None],
            groups=(devices.group, devices.gradient_group),
            splits=splits,
        )
        if number - 1 in devices.own_stages:
            stage.check_local(links[number - 1])
        stages.append(stage)
    return stages


def _link(transfer: Transfer, plan: Plan, devices: StageDevices, number: int) -> CutValue:
    """The messages of a value that a stage sends to the next one."""
    dtype: torch.dtype = getattr(torch, transfer.dtype)
    source, target = (
        TransferEnd(devices.ranks[stage], tuple(devices.meshes[stage].shape), layout)
        for stage, layout in ((number, transfer.source), (number + 1, transfer.target))
    )
    back = plan.options.mode == "training" and transfer.has_gradient
    return CutValue(
        value=transfer.value,
        forward=Route.of(transfer.shape, dtype, source, target),
        gradient=Route.of(transfer.shape, dtype, target, source) if back else None,
    )
