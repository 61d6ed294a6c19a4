"""`parallelize`: makes a model run as planned."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.base.arguments import Seed, check_arguments
from autoshard.errors import ArgumentTypeError, AutoshardError, PlanError
from autoshard.graph import DType
from autoshard.plan import Plan, Stage
from autoshard.runtime.autocast import outside_autocast
from autoshard.runtime.checks.agreement import raised_on_all_ranks
from autoshard.runtime.checks.plan_runtime import check_runtime
from autoshard.runtime.model_class import NotPickled, class_as_before, original_forward
from autoshard.runtime.parameters.parameters import (
    check_parameters,
    check_stored_alike,
    distribute_state,
    stored_names,
)
from autoshard.runtime.parameters.shared_buffers import shared_buffers_kept
from autoshard.runtime.parameters.state_dicts import support_state_dicts
from autoshard.runtime.pipelining import Pipelined, pipeline
from autoshard.runtime.planned_forward import PlannedForward, Programs, RngStep
from autoshard.runtime.program.accumulation import GradientAccumulation
from autoshard.runtime.program.local_program import LocalProgram
from autoshard.runtime.python_state.state import PythonState
from autoshard.runtime.signature import ShapeError
from autoshard.runtime.torch_check import prepare_torch
from autoshard.runtime.unsharded_forward import UnshardedForward
from autoshard.torch_private import call_with_hooks, end_graph, not_compiled, without_compiler

ModelT = TypeVar("ModelT", bound=nn.Module)


@check_arguments
def parallelize(
    model: ModelT,
    plan: Plan | Mapping[str, Plan],
    device_mesh: DeviceMesh,
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    custom_operators: Collection[str] = (),
    seed: Seed = 0,
    other_shapes: Literal["replicate", "error"] = "replicate",
    ignore_state: Collection[str] = (),
) -> ModelT:
    """Make a model run as planned, on every rank of a mesh.

    The model is changed in place. Its parameters become DTensors with the planned placements and
    the same names, so that any optimizer, `torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler`
    and, through `dcp_state_dict`, `torch.distributed.checkpoint` work. Its forward becomes the
    planned program, which runs exactly the collectives of the plan.

    Forward takes the same arguments as when the model was exported. A tensor may be the full
    batch, of which each rank takes its shard, or a DTensor, which says what each rank has of it.
    Replicated results are plain tensors, sharded ones are DTensors.

    Dynamic sizes (`torch.export.Dim`) may differ from the planned ones if tensors are full ones or
    DTensors and the planned layouts can shard the sizes. The plan's time and memory are for the
    planned sizes.

    `torch.compile(model, fullgraph=True)` supports the planned model, of random operators dropout
    only. The compiler then decides what is saved for backward.

    Tensors of other shapes, such as the last smaller batch, run unsharded (`other_shapes`).

    A plan for inference computes no gradients, and runs under `torch.no_grad()`.

    A call raises `PlanError` where the planned program would silently compute something else than
    the model: if Python state that forward read has another value than when it was exported
    (attributes, modes, globals, code, hooks of inner modules, modules), or if ranks that should
    pass the same tensor pass different ones.

    Args:
        model: a model with the full weights on every rank, or on the meta device if
            `load_checkpoint` loads them afterwards.
        plan: a plan made for this model and for a mesh of this shape (`autoshard.pipeline`
            describes the result for one with pipeline stages); or several by name, which
            store parameters in one layout (`Plan.state_pins`). A call runs the plan that takes its
            arguments and was exported in the present modes and Python state of the model: a
            training plan after `train()`, a plan for inference after `eval()`.
        device_mesh: a mesh with the axis names and sizes of the plan.
        constants: values of tensors that forward created during export, by name; only needed for
            those that are neither attributes of the model nor small literals.
        custom_operators: custom operators that the plan may call, as torch names them
            (`mylib::gate`), or their namespaces (`mylib`). A plan may come from a server,
            so it may call only what is allowed here.
        seed: seed of random operators such as dropout; the same on all ranks. Random numbers
            depend on it and on the step, which `rng_step` adds to a checkpoint.
        other_shapes: what a call does whose tensors have shapes that no plan is for, such as the
            last smaller batch of an epoch. With "replicate" every rank runs the unsharded model on
            the whole batch, with all parameters gathered, and a warning says so once; with "error"
            it raises `PlanError`, and so it always does with pipeline stages.
        ignore_state: patterns of Python state on which no result depends, and which is therefore
            not compared with the export, such as `["layers.0.tau", "*.p", "*._forward_hooks"]`.

    Returns:
        The same object; its class is now a subclass of its former class, of the same name.

    Raises:
        PlanError: there is no plan, or it does not fit mesh or model, on this rank or on another.
            The model is then unchanged.
        TorchVersionError: the installed torch does not do what planned models rely on.
    """
    if isinstance(model, Planned):
        raise PlanError("the model is parallelized already; apply plans to a new model")
    given = _plans(plan)
    if any(one.pipeline is not None for one in given):
        settings: Any = {
            "constants": constants,
            "custom_operators": custom_operators,
            "ignore_state": ignore_state,
        }
        return pipeline(model, plan, device_mesh, seed=seed, **settings)
    plans = {"": plan} if isinstance(plan, Plan) else dict(plan)
    if not plans:
        raise PlanError("no plan is given")
    stages = {name: _only_stage(one) for name, one in plans.items()}
    check_stored_alike(stages)
    steps, accumulation = RngStep(), GradientAccumulation(_accumulation_dtype(stages.values()))
    forwards = {
        name: PlannedForward(
            stages[name],
            partial(
                LocalProgram,
                mesh=device_mesh,
                seed=seed,
                custom_operators=custom_operators,
                model=model,
            ),
            device_mesh,
            training=one.options.mode == "training",
            constants=dict(constants or {}),
            signature=signature(model.forward),
            steps=steps,
            accumulation=accumulation,
        )
        for name, one in plans.items()
    }
    state = PythonState(
        model,
        {name: forward.program.graph for name, forward in forwards.items()},
        stored_names(stages.values()),
        ignore_state,
    )
    with raised_on_all_ranks(device_mesh):
        prepare_torch(device_mesh)
        for forward in forwards.values():
            check_parameters(model, forward.stage, frozen=forward.frozen)
        state.check_applies()
    programs = Programs(forwards, state)
    with shared_buffers_kept(model):
        with raised_on_all_ranks(device_mesh):
            for forward in forwards.values():
                forward.attach(model)
        distribute_state(model, stages.values(), device_mesh, programs.first.program.place)
    if not any(device_mesh.get_coordinate() or ()):
        for text in filter(None, (stage.idle_text for stage in stages.values())):
            warnings.warn(text, stacklevel=2)
    vars(model).pop("forward", None)
    original = original_forward(model, state.own_forward)
    vars(model)["_unsharded"] = (
        UnshardedForward(original, device_mesh, seed, given[0].graph.mixed_precision)
        if other_shapes == "replicate"
        else None
    )
    model.__class__ = class_as_before(Planned, type(model), original)
    vars(model)["_programs"] = programs
    computes = device_mesh.device_type, programs.first.program.graph.compute_dtype
    vars(model)["_computes"] = computes
    support_state_dicts(model)
    return model


def _plans(plan: object) -> list[Plan]:
    """The plans of a call.

    Raises:
        ArgumentTypeError: it is neither a plan nor a mapping of plans.
    """
    plans = list(plan.values()) if isinstance(plan, Mapping) else [plan]
    found = [one for one in plans if isinstance(one, Plan)]
    if len(found) < len(plans):
        wrong = next(type(one).__name__ for one in plans if not isinstance(one, Plan))
        raise ArgumentTypeError(
            f"{wrong} is passed in place of a plan: pass a Plan of make_plan, or Plan.load(path)"
        )
    return found


def _accumulation_dtype(stages: Iterable[Stage]) -> torch.dtype | None:
    """The element type of sums of gradients, of the first plan that has one."""
    name = next((s.accumulation_dtype for s in stages if s.accumulation_dtype), None)
    return None if name is None else getattr(torch, name)


_REPLACED = (
    "model.forward was replaced after the plan was applied, by a function that does not run the "
    "planned forward: replace it first, then export and plan; or delete model.forward; or, if that "
    "is what you want, pass ignore_state=['forward'] to parallelize"
)


_NOT_TRACED = (
    "a planned model cannot be a part of a larger graph: leave fullgraph=True out of the "
    "torch.compile around it, or compile the model itself, torch.compile(model, fullgraph=True)"
)


class Planned(NotPickled):
    """Mixin class of models that run as planned."""

    _programs: Programs
    _unsharded: UnshardedForward | None
    _computes: tuple[str, DType | None]
    _compiled_call_impl: Callable[..., Any] | None  # the attribute that nn.Module does not copy
    planned_forward: ClassVar[Callable[..., Any]]
    """Type of the devices, and element type in which operators read most parameters."""

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run hooks and forward; a compiler compiles the planned program alone.

        Raises:
            PlanError: `forward` was replaced by a function that does not run the plan.
        """
        end_graph(_NOT_TRACED)
        run = self._compiled_call_impl or self._uncompiled
        return run(args, kwargs)

    @not_compiled
    def _uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return without_compiler(self._call, args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(self, nn.Module)
        if "forward" not in self.__dict__ and type(self).forward is type(self).planned_forward:
            return call_with_hooks(self, *args, **kwargs)
        return self._call_replaced(args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the planned program in all later calls, as `torch.compile(model)` does.

        Arguments are those of `torch.compile`.
        """
        self._compiled_call_impl = torch.compile(self._uncompiled, *args, **kwargs)

    def _call_replaced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a model whose forward a library or a program has replaced or wrapped."""
        assert isinstance(self, nn.Module)
        programs = self._programs
        before = programs.num_calls
        try:
            result = call_with_hooks(self, *args, **kwargs)
        except AutoshardError:
            raise
        except Exception as error:
            if programs.num_calls == before and not programs.state.ignores(("forward",)):
                raise PlanError(_REPLACED) from error
            raise
        if programs.num_calls == before and not programs.state.ignores(("forward",)):
            raise PlanError(_REPLACED)
        return result

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan with the arguments and results of the exported forward.

        Raises:
            PlanError: the model is in another mode than it was exported in, or is called under
                `torch.autocast` with another element type than the plan's.
        """
        end_graph(_NOT_TRACED)
        return without_compiler(self._forward, args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device, dtype = self._computes
        if not torch.is_autocast_enabled(device):
            return self._run(args, kwargs)
        with outside_autocast(device, dtype):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(self, nn.Module)
        try:
            forward = self._programs.choose(self, args, kwargs)
            return forward(args, kwargs)
        except ShapeError as error:
            if self._unsharded is None:
                raise
            why = error
        first = self._programs.first
        with torch.set_grad_enabled(self._programs.train and torch.is_grad_enabled()):
            result = self._unsharded(self, args, kwargs, step=first.steps.value, why=why)
        first.steps.value += 1
        return result

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Sequence[str]:
        """The attribute that `DistributedDataParallel` reads first of a model that it wraps.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "a planned model reduces its gradients itself and cannot be wrapped in "
            "DistributedDataParallel; with accelerate and the Trainer of transformers use "
            "PlannedAccelerator and PlannedTrainer of autoshard.integrations"
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for all micro-batches of a step but the last, as of DistributedDataParallel.

        Gradients are summed on each rank and reduced over ranks with those of the first backward
        pass whose forward ran outside of the context. Until then, `grad` has sums of gradients of
        full parameters; what reads it, such as an optimizer, gets the reduced gradient.

        Example:
            >>> for micro_batch in micro_batches[:-1]:
            ...     with model.no_sync():
            ...         model(micro_batch).backward()
            >>> model(micro_batches[-1]).backward()
        """
        return self._programs.first.accumulation.no_sync()


def takes_other_shapes(model: nn.Module) -> bool:
    """True if a planned model takes tensors of other shapes than planned."""
    return isinstance(model, Planned) and model._unsharded is not None  # noqa: SLF001  ours


def planned_forward(model: nn.Module) -> PlannedForward:
    """The program of a planned model; the first one of several.

    Raises:
        PlanError: the model does not run as planned.
    """
    if isinstance(model, Pipelined):
        raise PlanError(
            "this works for models without pipeline stages; with stages, every rank passes the "
            "arguments of the whole batch to model.step"
        )
    if not isinstance(model, Planned):
        raise PlanError(
            f"{type(model).__name__} does not run as planned; apply a plan with parallelize first"
        )
    return model._programs.first  # noqa: SLF001  ours


def planned_programs(model: nn.Module) -> tuple[PlannedForward, ...]:
    """All programs of a planned model.

    Raises:
        PlanError: the model does not run as planned.
    """
    planned_forward(model)
    assert isinstance(model, Planned)
    return model._programs.all  # noqa: SLF001  ours


def rng_step(model: nn.Module) -> RngStep:
    """The step index that seeds a planned model's random numbers, to be saved in checkpoints.

    Random operators such as dropout are seeded by the seed given to `parallelize`, the index of
    the step and the rank's shard. To resume training, the index must be restored. It is not part
    of the model's state dict; save it next to it:

        state = {"model": ..., "optimizer": ..., "rng_step": rng_step(model)}
        dcp.save(dcp_state_dict(state), checkpoint_id="run")

    `dcp.load` with the same keys sets it in the model; so does `rng_step(model).value = ...`.
    Another plan draws the same numbers if it shards the tensors with dropout in the same way.

    Args:
        model: returned by `parallelize`.

    Raises:
        PlanError: the model does not run as planned.
    """
    return model.rng_step if isinstance(model, Pipelined) else planned_forward(model).steps


def _only_stage(plan: Plan) -> Stage:
    if not plan.found:
        raise PlanError(f"the document contains no plan to apply: {plan.reason}")
    check_runtime(plan)
    return plan.stages[0]
