"""`pipeline`: makes a model run as planned in several stages."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import partial, wraps
from inspect import signature
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.graph.buffers import HeldBuffers
from autoshard.plan import Plan, Stage
from autoshard.runtime.accumulation import GradientAccumulation
from autoshard.runtime.dtensor_handlers import install_dtensor_handlers
from autoshard.runtime.pipelining.deferred_norms import DeferredBatchNorms
from autoshard.runtime.pipelining.devices import StageDevices
from autoshard.runtime.pipelining.micro_batches import Join
from autoshard.runtime.pipelining.model_part import (
    check_model,
    drop_removed,
    keep_own_part,
    removed_names,
    saved_tensors,
)
from autoshard.runtime.pipelining.norms import clip_gradients, refuse_norms_of_one_rank
from autoshard.runtime.pipelining.runner import LossFunction, PipelineRunner
from autoshard.runtime.pipelining.stage import PlannedStage
from autoshard.runtime.pipelining.stage_forward import Checkpointing, StageForward
from autoshard.runtime.planned_forward import RngStep
from autoshard.runtime.program import LocalProgram
from autoshard.runtime.state_dicts import support_state_dicts

ModelT = TypeVar("ModelT", bound=nn.Module)


class Pipelined:
    """Mixin class of models that run as planned in several stages.

    A rank has the parameters of its own stages only. Its length, items and iteration are those of
    the stages of this rank.
    """

    _pipeline: PipelineRunner
    _removed: frozenset[str]
    _saved: tuple[dict[str, torch.Tensor], ...]

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
            target: second argument of the loss function, divided along dim 0.
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
        loss, result = self._pipeline.train(args, kwargs, target=target, keeps=return_outputs)
        return (loss, result) if return_outputs else loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward of all micro-batches, without gradients.

        Returns:
            The result of forward on the ranks of the last stage, None on others.

        Raises:
            PlanError: the arguments do not fit, or gradients are enabled and the plan is for
                training.
        """
        if self._pipeline.is_training and torch.is_grad_enabled():
            raise PlanError(
                "forward of a model with pipeline stages computes no gradients: call "
                "model.step(...), which runs forward and backward, or use torch.no_grad()"
            )
        return self._pipeline.infer(args, kwargs)

    def __len__(self) -> int:
        """Number of stages of this rank."""
        return len(self._pipeline.stages)

    def __getitem__(self, index: int) -> PlannedStage:
        """A stage of this rank."""
        return self._pipeline.stages[index]

    def __iter__(self) -> Iterator[PlannedStage]:
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
    def read_buffers(self) -> frozenset[str]:
        """Names of the buffers that the stages of this rank read."""
        names = (stage.forward_program.buffers for stage in self._pipeline.stages)
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


def pipeline(
    model: ModelT,
    plan: Plan,
    device_mesh: DeviceMesh,
    *,
    loss_fn: LossFunction | None = None,
    scale_grads: bool = True,
    checkpoint: Checkpointing = "always",
    deferred_batch_norm: bool = False,
    join: Join | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    custom_operators: Collection[str] = (),
    seed: int = 0,
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
        plan: a plan with several stages, made for this model and for a mesh of this shape.
        device_mesh: a mesh with the axis names and sizes of the plan. In a single process, with a
            mesh of one device, a plan whose stages have one device each runs too.
        loss_fn: the loss of a micro-batch, from the result of forward and the target; None if
            forward returns the loss.
        scale_grads: True if the loss of a step is the mean of the losses of micro-batches, as for
            losses that are means over the batch; False if it is their sum.
        checkpoint: the micro-batches for which the planned activation checkpoints run; memory is
            as planned with "always".
        deferred_batch_norm: True to update the running statistics of batch norms once per step,
            by those of the whole batch; otherwise each micro-batch updates them.
        join: makes one result of those of micro-batches. By default tensors are concatenated along
            the dim in which the arguments are divided, and scalars are averaged.
        constants: as for `parallelize`.
        custom_operators: as for `parallelize`.
        seed: as for `parallelize`; each micro-batch draws the numbers of a step of its own.

    Returns:
        The same object; its class is now a subclass of its former class.

    Raises:
        PlanError: the plan has no stages, or does not fit mesh, model or schedule.
    """
    if isinstance(model, Pipelined):
        raise PlanError("the model has pipeline stages already; apply plans to a new model")
    if plan.pipeline is None:
        raise PlanError("the plan has a single stage: apply it with parallelize")
    devices = StageDevices.of(plan, device_mesh)
    steps = RngStep()
    compiling = partial(LocalProgram, seed=seed, custom_operators=custom_operators, model=model)
    forwards = [
        StageForward(
            plan.stages[number],
            partial(compiling, mesh=devices.meshes[number]),
            devices.meshes[number],
            training=plan.options.mode == "training",
            constants=dict(constants or {}),
            signature=signature(model.forward),
            steps=steps,
            accumulation=GradientAccumulation(_dtype(plan.stages[number])),
        )
        for number in devices.own_stages
    ]
    check_model(model, plan, forwards)
    for forward in forwards:
        forward.attach(model)
        if deferred_batch_norm:
            forward.norms = DeferredBatchNorms(model, forward.program.graph)
    held = HeldBuffers(model)
    saved = saved_tensors(model, plan, devices)
    called = signature(model.forward)
    keep_own_part(model, plan, devices, forwards)
    held.follow()
    runner = PipelineRunner(
        model,
        plan,
        devices,
        forwards,
        signature=called,
        steps=steps,
        loss_fn=loss_fn,
        scale_grads=scale_grads,
        checkpoint=checkpoint,
        join=join,
    )
    for text in filter(None, (forward.stage.idle_text for forward in forwards)):
        warnings.warn(text, stacklevel=2)
    model.__class__ = _pipelined_class(type(model))
    vars(model)["_pipeline"] = runner
    install_dtensor_handlers()
    support_state_dicts(model)
    vars(model)["_saved"] = saved
    vars(model)["_removed"] = removed_names(model, plan)
    drop_removed(model, vars(model)["_removed"])
    refuse_norms_of_one_rank(model)
    return model


def _pipelined_class(original: type[ModelT]) -> type[ModelT]:
    """A subclass that runs the plan, whose forward has the signature of the original one."""

    @wraps(original.forward)
    def forward(self: Pipelined, *args: Any, **kwargs: Any) -> Any:
        return Pipelined.forward(self, *args, **kwargs)

    members = {"__module__": original.__module__, "__doc__": original.__doc__, "forward": forward}
    made: type[ModelT] = type(f"Pipelined{original.__name__}", (Pipelined, original), members)
    return made


def _dtype(stage: Stage) -> torch.dtype | None:
    """The element type of sums of gradients, if it is not that of the gradients."""
    name = stage.accumulation_dtype
    return None if name is None else getattr(torch, name)
