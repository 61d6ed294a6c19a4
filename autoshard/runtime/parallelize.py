"""Applying a plan to a model."""

from collections.abc import Callable, Collection, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.plan import PlacedInput, Plan, Stage
from autoshard.runtime.constants import constant_value
from autoshard.runtime.local_parameters import LocalParameter
from autoshard.runtime.overflow import agree_on_overflow
from autoshard.runtime.parameters import Holder, check_parameters, distribute_parameters
from autoshard.runtime.preparation import prepared_inputs
from autoshard.runtime.program import LocalProgram
from autoshard.runtime.resizing import resized_stage
from autoshard.runtime.signature import Arguments, Results

ModelT = TypeVar("ModelT", bound=nn.Module)

_KEPT = 8
"""Programs for other sizes than the planned ones that are kept compiled."""


def parallelize(
    model: ModelT,
    plan: Plan,
    device_mesh: DeviceMesh,
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    custom_operators: Collection[str] = (),
    seed: int = 0,
) -> ModelT:
    """Make a model run as planned, on every rank of a mesh.

    The model is changed in place: its parameters become DTensors placed as the plan says,
    under the same names, so that any optimizer, `torch.nn.utils.clip_grad_norm_`,
    `torch.amp.GradScaler` and `torch.distributed.checkpoint` work (the latter through
    `dcp_state_dict`); and its forward becomes the planned program, whose collectives are those of
    the plan.

    Forward takes what it took when it was exported. A tensor may be the whole batch (each
    rank takes its slice), the rank's own slice, or a DTensor placed as planned. A result
    that is whole is a plain tensor, and one that is cut a DTensor.

    Sizes that the export left open (`torch.export.Dim`) may be others than the planned ones: a
    tensor is then the whole one or a DTensor. The layouts stay as planned, so each size has to be
    one that they can cut. What the plan says of time and memory holds for the planned sizes.

    `torch.compile(model, fullgraph=True)` takes the planned model, unless it draws random numbers.
    What is held for backward is then up to the compiler, and gradients enter at the loss alone.

    A plan for inference computes no gradients, and runs under `torch.no_grad()`. Dropout and
    the like act as they did when the model was exported: `train()` and `eval()` do not reach
    into the program.

    Args:
        model: holds the whole weights on every rank, or is on the meta device and gets them
            from `load_checkpoint`.
        plan: made for this model and for a mesh of this shape.
        device_mesh: with the axis names and sizes of the plan.
        constants: values of tensors that forward made while it was exported, by name; where
            they are attributes of the model, or small and written as numbers, they need not be
            given.
        custom_operators: operators of the model's own that the plan may call, as torch names
            them (`mylib::gate`), or their namespaces (`mylib`). A plan may come from elsewhere,
            so it calls none that it was not trusted with.
        seed: of random operators such as dropout; the same on all ranks. Numbers follow from it
            and the step, which `rng_step` keeps in a checkpoint.

    Returns:
        The same object; its class is now a subclass of the one it had.

    Raises:
        PlanError: the plan has no stage or several, or does not fit mesh or model. The model
            is then unchanged.
    """
    if isinstance(model, Planned):
        raise PlanError("the model runs as planned already; apply a plan to a fresh model")
    stage = _only_stage(plan)
    training = plan.options.mode == "training"
    compile_stage = partial(
        LocalProgram, mesh=device_mesh, seed=seed, custom_operators=custom_operators
    )
    forward = PlannedForward(
        stage, compile_stage, device_mesh, training=training, constants=dict(constants or {})
    )
    values = forward.program.graph.values
    frozen = frozenset(
        p.name for p in stage.parameters if training and not values[p.name].requires_grad
    )
    check_parameters(model, stage, frozen=frozen)
    forward.attach(model)
    original = type(model)
    members = {"__module__": original.__module__, "__doc__": original.__doc__}
    model.__class__ = type(f"Planned{original.__name__}", (Planned, original), members)
    vars(model)["_planned_forward"] = forward
    agree_on_overflow()
    return model


class Planned:
    """Mixed into the class of a model that runs as planned."""

    _planned_forward: "PlannedForward"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan; takes and returns what the exported forward did."""
        return self._planned_forward(args, kwargs)


def planned_forward(model: nn.Module) -> "PlannedForward":
    """What runs when a planned model is called.

    Raises:
        PlanError: the model does not run as planned.
    """
    if not isinstance(model, Planned):
        raise PlanError(
            f"{type(model).__name__} does not run as planned; apply a plan with parallelize first"
        )
    return model._planned_forward  # noqa: SLF001  ours


class PlannedForward:
    """The program with its parameters, arguments and results.

    Args:
        stage: of the plan.
        compile_stage: makes the program of the stage, or of the stage at other sizes.
        mesh: the devices.
        training: whether gradients are computed.
        constants: values of captured tensors that the model does not hold.

    Attributes:
        step: number of the next step.
    """

    def __init__(
        self,
        stage: Stage,
        compile_stage: Callable[[Stage], LocalProgram],
        mesh: DeviceMesh,
        *,
        training: bool,
        constants: dict[str, torch.Tensor],
    ) -> None:
        self._stage = stage
        self._compile = compile_stage
        self._mesh = mesh
        self._training = training
        self._constants = constants
        self._planned = self._call_of(stage)
        self._resized = lru_cache(_KEPT)(self._call_at)
        self._held: dict[str, Callable[[], torch.Tensor]] = {}
        self.step = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedForward":
        """The same program, of the copies of parameters and buffers."""
        copied = memo[id(self)] = copy(self)
        # What is kept for other sizes would hold on to the original.
        vars(copied)["_resized"] = lru_cache(_KEPT)(MethodType(PlannedForward._call_at, copied))
        vars(copied)["_held"] = deepcopy(self._held, memo)
        return copied

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the buffers that the program reads from the model."""
        graph = self.program.graph
        used = {name for name, uses in graph.consumers.items() if uses}
        used.update(output.name for output in graph.outputs if output.name is not None)
        buffers = (i.target for i in self._stage.inputs if i.kind == "buffer" and i.name in used)
        return frozenset(buffers) - set(self._constants)

    @property
    def program(self) -> LocalProgram:
        """What runs at the sizes of the plan."""
        return self._planned.program

    @property
    def arguments(self) -> Arguments:
        """What forward takes."""
        return self._planned.arguments

    def _call_of(self, stage: Stage) -> "_Call":
        program = self._compile(stage)
        return _Call(
            program,
            Arguments(stage, program.graph, self._mesh, program.place),
            Results(stage, program.graph, self._mesh),
            prepared_inputs(program.graph, stage, program.place),
        )

    def _call_at(self, sizes: tuple[tuple[str, int], ...]) -> "_Call":
        """What runs for other numbers of the open sizes."""
        program = self.program
        try:
            stage = resized_stage(self._stage, program.graph, dict(sizes), program.place.axis_sizes)
            return self._call_of(stage)
        except PlanError as error:
            raise PlanError(
                f"the plan does not run with tensors of these sizes: {error}; pad them, or plan "
                f"for these sizes"
            ) from error

    def attach(self, model: nn.Module) -> None:
        """Distribute a model's parameters and find its buffers and constants.

        Raises:
            PlanError: a buffer or a constant is nowhere to be found; the model is unchanged.
        """
        for placed in self._stage.inputs:
            if placed.kind in ("buffer", "constant"):
                self._held[placed.name] = self._find(model, placed)
        holders = distribute_parameters(model, self._stage, self._mesh, self.program.place)
        for placed, holder in zip(self._stage.parameters, holders, strict=True):
            self._held[placed.name] = LocalParameter(holder).get

    def _find(self, model: nn.Module, placed: PlacedInput) -> Callable[[], torch.Tensor]:
        device = self.program.place.device
        if placed.target in self._constants:
            value = self._constants[placed.target].to(device)
            return lambda: value
        try:
            holder = Holder.of(model, placed.target)
            value = holder.get()
        except AttributeError:
            known = constant_value(self.program.graph, placed.name, device)
            if known is not None:
                return lambda: known
            raise PlanError(
                f"the model has no {placed.kind} {placed.target!r}; pass its value in "
                f"`constants`, as in exported_program.constants"
            ) from None
        if not isinstance(value, torch.Tensor) or value.shape != placed.shape:
            raise PlanError(f"{placed.target!r} is no tensor of shape {placed.shape} in the model")
        if not value.is_meta:
            setattr(holder.module, holder.name, value.to(device))
        return holder.get

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one step on this rank.

        Raises:
            PlanError: the arguments do not fit, or the step is recomputed by activation
                checkpointing and would draw other random numbers.
        """
        if self.program.is_random and torch.compiler.is_compiling():
            raise PlanError(
                "the planned model draws random numbers, which torch.compile cannot draw alike on "
                "all ranks: export the model with dropout 0, or run it uncompiled"
            )
        # While autograd runs, the thread belongs to a graph task.
        if self.program.is_random and torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            raise PlanError(
                "the planned model draws random numbers, so it cannot be recomputed in the "
                "backward pass: apply activation checkpointing inside the model, not around it"
            )
        with torch.set_grad_enabled(self._training and torch.is_grad_enabled()):
            # Slices that were copied to the device are held by nobody but the program.
            leaves = self.arguments.flatten(args, kwargs)
            sizes = self.arguments.sizes(leaves)
            call = self._resized(tuple(sizes.items())) if sizes else self._planned
            given = call.arguments.localize(leaves)
            inputs = (self._input(placed, given, call) for placed in self._stage.inputs)
            outputs = call.program(inputs, step=self.step)
            self.step += 1
            return call.results.nest(outputs)

    def _input(
        self, placed: PlacedInput, given: dict[str, torch.Tensor], call: "_Call"
    ) -> torch.Tensor:
        match placed.kind:
            case "user":
                return given.pop(placed.name)
            case "prepared":
                return call.prepared[placed.name]
        return self._held[placed.name]()


@dataclass(frozen=True, slots=True)
class _Call:
    """A program for tensors of certain sizes, between what is passed and what comes out."""

    program: LocalProgram
    arguments: Arguments
    results: Results
    prepared: Mapping[str, torch.Tensor]


def _only_stage(plan: Plan) -> Stage:
    if not plan.found:
        raise PlanError(f"the document has no plan to apply: {plan.reason}")
    if len(plan.stages) > 1:
        raise PlanError(
            f"the plan has {len(plan.stages)} pipeline stages; apply each one to its own part "
            f"of the model"
        )
    return plan.stages[0]
