"""`pipeline`: makes a model run as planned in several stages."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.base.arguments import DimIndex, Seed, check_arguments, names_elsewhere
from autoshard.errors import PlanError
from autoshard.plan import Plan, Stage
from autoshard.runtime.autocast import outside_autocast
from autoshard.runtime.checks.agreement import raised_on_all_ranks
from autoshard.runtime.checks.plan_runtime import check_runtime
from autoshard.runtime.global_tensors.dtensor_handlers import install_dtensor_handlers
from autoshard.runtime.model_class import NotPickled, class_as_before, original_forward
from autoshard.runtime.parameters.parameters import stored_names
from autoshard.runtime.parameters.shared_buffers import shared_buffers_kept
from autoshard.runtime.parameters.state_dicts import support_state_dicts
from autoshard.runtime.pipelining.deferred_norms import DeferredBatchNorms
from autoshard.runtime.pipelining.devices import StageDevices
from autoshard.runtime.pipelining.full_states import support_full_states
from autoshard.runtime.pipelining.idle import Idle, without_stages
from autoshard.runtime.pipelining.losses import LossFunction
from autoshard.runtime.pipelining.micro_batches import Join
from autoshard.runtime.pipelining.model_part import (
    check_held_alike,
    check_model,
    drop_removed,
    keep_own_part,
    removed_names,
    saved_names,
    saved_tensors,
)
from autoshard.runtime.pipelining.norms import clip_gradients
from autoshard.runtime.pipelining.runner import PipelineRunner
from autoshard.runtime.pipelining.schedules import MakeSchedule
from autoshard.runtime.pipelining.stage import ScheduledStage
from autoshard.runtime.pipelining.stage_forward import Checkpointing, StageForward
from autoshard.runtime.pipelining.uninitialised import allocate
from autoshard.runtime.planned_forward import RngStep
from autoshard.runtime.program.accumulation import GradientAccumulation
from autoshard.runtime.program.local_program import LocalProgram
from autoshard.runtime.python_state.state import PythonState
from autoshard.runtime.torch_check import prepare_pipelines
from autoshard.torch_private import never_compiled

ModelT = TypeVar("ModelT", bound=nn.Module)


class Pipelined(NotPickled):
    """Mixin class of models that run as planned in several stages.

    A rank has the parameters of its own stages only. Its length, items and iteration are those of
    the stages of this rank.
    """

    _runners: Sequence[PipelineRunner]
    _removed: frozenset[str]
    _saved: tuple[dict[str, torch.Tensor], ...]
    _saved_names: Mapping[str, str]

    @never_compiled
    def step(
        self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Run forward and backward of all micro-batches; gradients are accumulated.

        Call it on every rank with the arguments of the whole batch, in place of
        `loss = model(...); loss.backward()`.

        Args:
            *args: of forward, of the whole batch: as many micro-batches as planned, one after the
                other in the dim in which a tensor is larger than a micro-batch. A tensor of the
                size of a micro-batch goes to every micro-batch.
            target: second argument of the loss function. Its tensors are divided along the dim
                along which the arguments are, or `target_dim`.
            return_outputs: True to return the result of forward too.
            **kwargs: named arguments of forward.

        Returns:
            The loss, a float64 tensor without dims, on all ranks: the mean of the losses of
            micro-batches, or their sum without `scale_grads`. With `return_outputs`, the loss and
            the result of forward, which is None except on the ranks of the last stage.

        Raises:
            PlanError: the arguments do not fit the plan, or the program would compute something
                else than the model.
        """
        training = next((one for one in self._runners if one.is_training), None)
        if training is None:
            raise PlanError("the plan is for inference and computes no gradients: call the model")
        with self._outside_autocast():
            loss, result = training.train(args, kwargs, target=target, keeps=return_outputs)
        return (loss, result) if return_outputs else loss

    @never_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward of all micro-batches, without gradients.

        Returns:
            The result of forward on the ranks of the last stage, None on others.

        Raises:
            PlanError: the arguments do not fit, or gradients are enabled and the plan is for
                training.
        """
        runners = [one for one in self._runners if not one.is_training] or self._runners
        if runners[0].is_training and torch.is_grad_enabled():
            raise PlanError(
                "forward of a model with pipeline stages computes no gradients: call "
                "model.step(...), which runs forward and backward, or use torch.no_grad()"
            )
        fitting = (one for one in runners if len(runners) == 1 or one.fits(args, kwargs))
        runner = next(fitting, runners[0])
        with self._outside_autocast():
            return runner.infer(args, kwargs)

    def _outside_autocast(self) -> AbstractContextManager[object]:
        graph = self._pipeline.stages[0].forward_program.program.graph
        return outside_autocast(self.devices.whole.device_type, graph.compute_dtype)

    @property
    def _pipeline(self) -> PipelineRunner:
        """The runner of the plan that was given first."""
        return self._runners[0]

    def __len__(self) -> int:
        """Number of stages of this rank."""
        return len(self._pipeline.stages)

    def __getitem__(self, index: int) -> ScheduledStage:
        """A stage of this rank."""
        return self._pipeline.stages[index]

    def __iter__(self) -> Iterator[ScheduledStage]:
        """The stages of this rank."""
        return iter(self._pipeline.stages)

    def to(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to move or to convert parameters.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "the parameters of pipeline stages are where the device mesh says and of the planned "
            "types: convert the model before the plan is made, and choose devices by the mesh"
        )

    def to_empty(
        self,
        *,
        device: str | torch.device | int | None,
        recurse: bool = True,
    ) -> Self:
        """Allocate the tensors of this rank's stages without initialising them.

        The next step checks that all have been initialised. Tied parameters stay tied.

        Args:
            device: of the mesh.
            recurse: True for all modules.

        Raises:
            PlanError: the device is not that of the mesh, or children are left out.
        """
        assert isinstance(self, nn.Module)
        wanted = self.devices.whole.device_type
        given = self._pipeline.stages[0].device if device is None else torch.device(device)
        if given.type != wanted or not recurse:
            raise PlanError(
                f"the parameters of pipeline stages are where the device mesh says: call "
                f"to_empty(device={wanted!r})"
            )
        allocate(self, self._pipeline.stages[0].device)
        return self

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages so that their norm is at most `max_norm`.

        Call it on every rank. A parameter that several stages hold counts once.

        Args:
            max_norm: the largest norm.
            norm_type: of the norm; may be infinite.

        Returns:
            The norm of the gradients of the whole model before, a float64 tensor without dims.
        """
        assert isinstance(self, nn.Module)
        parameters = dict(self.named_parameters())
        counted = [p for name, p in parameters.items() if name not in self.tied_copies]
        return clip_gradients(list(parameters.values()), counted, self.devices, max_norm, norm_type)

    @property
    def tied_copies(self) -> frozenset[str]:
        """Names of the parameters of which an earlier stage on other ranks has a copy too."""
        return self._pipeline.tied.copies

    @property
    def rng_step(self) -> RngStep:
        """Index of the next micro-batch, which seeds random numbers."""
        return self._pipeline.steps

    @property
    def removed_names(self) -> frozenset[str]:
        """Names in the state dict of the tensors that only other ranks hold."""
        return self._removed

    @property
    def saved_tensors(self) -> tuple[dict[str, torch.Tensor], ...]:
        """The tensors that each pipeline rank saves, by name, on the meta device."""
        return self._saved

    @property
    def saved_names(self) -> Mapping[str, str]:
        """For each name in the state dict of the whole model, the one of `saved_tensors`."""
        return self._saved_names

    @property
    def read_buffers(self) -> frozenset[str]:
        """Names of the buffers that the stages of this rank read."""
        stages = (stage for runner in self._runners for stage in runner.stages)
        names = (stage.forward_program.buffers for stage in stages)
        return frozenset().union(*names)

    @property
    def devices(self) -> StageDevices:
        """The devices of all stages."""
        return self._pipeline.devices

    def no_sync(self) -> NoReturn:
        """Refuse: a step already reduces the gradients of its micro-batches once.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "step() reduces the gradients of all its micro-batches once: plan more micro-batches "
            "instead of no_sync()"
        )


for _name in ("cuda", "cpu", "half", "float", "double", "bfloat16", "type"):
    setattr(Pipelined, _name, Pipelined.to)


_DIVIDED = "arguments are divided along the dim in which they are larger than a micro-batch"


@names_elsewhere(
    balance="it is an option of the plan: PlanOptions(balance=(2, 3, 2))",
    chunks="it is an option of the plan: PlanOptions(micro_batches=8)",
    n_microbatches="it is an option of the plan: PlanOptions(micro_batches=8)",
    split_spec="cuts are options of the plan: PlanOptions(cuts=('before:layers.4',)), and calls of "
    "pipe_split() and annotate_split_points are kept",
    split_policy="cuts are options of the plan: PlanOptions(cuts=cut_names(graph, policy(graph)))",
    mb_args="pass the arguments of a micro-batch to export_model",
    mb_kwargs="pass the arguments of a micro-batch to export_model",
    args_chunk_spec=_DIVIDED,
    kwargs_chunk_spec=_DIVIDED,
    output_merge_spec="pass join=, a function that makes one result of those of micro-batches",
    group="the device mesh has the process groups: DeviceMesh.from_group makes one of a group",
    worker_map="ranks communicate through the groups of the device mesh, and not by RPC",
    devices="each rank has one device, that of the device mesh; split_model needs no ranks",
    input_device="arguments are moved to the device of the mesh",
)
@check_arguments
def pipeline(
    model: ModelT,
    plan: Plan | Mapping[str, Plan],
    device_mesh: DeviceMesh,
    *,
    loss_fn: LossFunction | None = None,
    target_dim: DimIndex | None = None,
    scale_grads: bool = True,
    checkpoint: Checkpointing = "always",
    deferred_batch_norm: bool = False,
    join: Join | None = None,
    schedule: MakeSchedule | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    custom_operators: Collection[str] = (),
    seed: Seed = 0,
    ignore_state: Collection[str] = (),
) -> ModelT:
    """Make a model run as planned in several pipeline stages, on every rank of a mesh.

    The model is changed in place. Of its parameters and buffers, each rank keeps those of its own
    stages, as DTensors under the same names; the others become None. `model.step(...)` runs the
    schedule of the plan, forward and backward, and `model(...)` under `torch.no_grad()` forward
    only.

    Example:
        >>> model = pipeline(model, plan, device_mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> loss = model.step(input_ids=ids, labels=ids)
        >>> optimizer.step()

    Args:
        model: a model with the full weights on every rank, or on the meta device if
            `load_checkpoint` loads them afterwards.
        plan: a plan with several stages, made for this model and for a mesh of this shape; or
            several by name, such as one for training and one for evaluation, which hold the same
            parameters on each rank (`Plan.state_pins`, and the same cuts).
        device_mesh: a mesh with the axis names and sizes of the plan. In a single process, with a
            mesh of one device, a plan whose stages have one device each runs too. On ranks of the
            job beyond the mesh, the model has no stage, and steps return None.
        loss_fn: the loss of a micro-batch, from the result of forward and the target; None if
            forward returns the loss.
        target_dim: the dim along which tensors of the target are divided; None for the one along
            which the arguments are, where the target must be as large as they.
        scale_grads: True if the loss of a step is the mean of the losses of micro-batches, as for
            losses that are means over the batch; False if it is their sum.
        checkpoint: the micro-batches for which the planned activation checkpoints run; memory is
            as planned with "always".
        deferred_batch_norm: True to update the running statistics of batch norms once per step,
            by those of the whole batch; otherwise each micro-batch updates them.
        join: makes one result of those of micro-batches. By default tensors are concatenated along
            the dim in which the arguments are divided, and scalars are averaged.
        schedule: of your own, in place of the planned one: a class of
            `torch.distributed.pipelining.schedules`, or a function that makes such an object of
            `(stages, micro_batches, loss_fn=..., scale_grads=...)`. It runs the stages of each rank
            as planned; predicted time and memory are those of the planned schedule.
        constants: as for `parallelize`.
        custom_operators: as for `parallelize`.
        seed: as for `parallelize`; each micro-batch draws the numbers of a step of its own.
        ignore_state: as for `parallelize`.

    Returns:
        The same object; its class is now a subclass of its former class.

    Raises:
        PlanError: a plan has no stages, or does not fit mesh, model, schedule or another plan.
        TorchVersionError: the installed torch does not do what planned models rely on.
    """
    plans = _plans_for(model, plan)
    if device_mesh.get_coordinate() is None:
        return without_stages(model)
    first, *_ = plans.values()
    devices = _devices_of(plans, device_mesh)
    with raised_on_all_ranks(device_mesh):
        prepare_pipelines(device_mesh)
    check_held_alike(plans, devices)
    steps, called = RngStep(), signature(model.forward)
    forwards = {
        name: _forwards(
            one,
            devices[name],
            partial(LocalProgram, seed=seed, custom_operators=custom_operators, model=model),
            constants=dict(constants or {}),
            signature=called,
            steps=steps,
        )
        for name, one in plans.items()
    }
    state = PythonState(
        model,
        {name: forwards[name][0].program.graph for name in plans},
        stored_names(
            (stage for one in plans.values() for stage in one.stages), ("parameter", "buffer")
        ),
        ignore_state,
        runs_own_hooks=False,
    )
    with raised_on_all_ranks(device_mesh):
        for name, one in plans.items():
            check_model(model, one, forwards[name])
        state.check_applies()
    own = next(iter(devices.values()))
    saved, names = saved_tensors(model, first, own), saved_names(model)
    with shared_buffers_kept(model):
        with raised_on_all_ranks(device_mesh):
            for forward in chain.from_iterable(forwards.values()):
                forward.attach(model)
                if deferred_batch_norm:
                    forward.norms = DeferredBatchNorms(model, forward.program.graph)
        keep_own_part(model, first, own, next(iter(forwards.values())))
    runners = [
        PipelineRunner(
            model,
            one,
            devices[name],
            forwards[name],
            signature=called,
            steps=steps,
            check_state=partial(_check_state, state, name),
            loss_fn=loss_fn,
            target_dim=target_dim,
            scale_grads=scale_grads,
            checkpoint=checkpoint,
            join=join,
            schedule=schedule,
        )
        for name, one in plans.items()
    ]
    for forward in chain.from_iterable(forwards.values()):
        if forward.stage.idle_text:
            warnings.warn(forward.stage.idle_text, stacklevel=2)
    original = original_forward(model, state.own_forward)
    model.__class__ = class_as_before(Pipelined, type(model), original)
    vars(model).pop("forward", None)
    vars(model)["_runners"] = runners
    for mesh in {mesh for one in devices.values() for mesh in one.meshes}:
        install_dtensor_handlers(mesh)
    support_state_dicts(model)
    support_full_states()
    vars(model)["_saved"], vars(model)["_saved_names"] = saved, names
    vars(model)["_removed"] = removed_names(model, first, names)
    drop_removed(model, vars(model)["_removed"])
    return model


def _plans_for(model: nn.Module, plan: Plan | Mapping[str, Plan]) -> dict[str, Plan]:
    """The plans by name, which may be applied to the model."""
    if isinstance(model, Pipelined | Idle):
        raise PlanError("the model has pipeline stages already; apply plans to a new model")
    plans = {"": plan} if isinstance(plan, Plan) else dict(plan)
    if not plans or any(one.pipeline is None for one in plans.values()):
        raise PlanError("a plan has a single stage, or there is none: apply it with parallelize")
    for one in plans.values():
        check_runtime(one)
    return plans


def _check_state(state: PythonState, name: str, model: nn.Module) -> None:
    """Check the Python state of a model, or of a copy of it, before a step."""
    state.check(model, name)


def _forwards(
    plan: Plan,
    devices: StageDevices,
    compile_stage: Callable[..., LocalProgram],
    **settings: Any,
) -> list[StageForward]:
    """The programs of this rank's stages."""
    training = plan.options.mode == "training"
    return [
        StageForward(
            plan.stages[number],
            partial(compile_stage, mesh=devices.meshes[number]),
            devices.meshes[number],
            training=training,
            accumulation=GradientAccumulation(_dtype(plan.stages[number])),
            **settings,
        )
        for number in devices.own_stages
    ]


def _devices_of(plans: Mapping[str, Plan], mesh: DeviceMesh) -> dict[str, StageDevices]:
    """The devices of each plan; equal stages share a mesh."""
    devices: dict[str, StageDevices] = {}
    for name, plan in plans.items():
        known = next(iter(devices.values()), None)
        devices[name] = StageDevices.of(plan, mesh, known)
    return devices


def _dtype(stage: Stage) -> torch.dtype | None:
    """The element type of sums of gradients, if it is not that of the gradients."""
    name = stage.accumulation_dtype
    return None if name is None else getattr(torch, name)
