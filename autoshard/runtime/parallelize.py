"""`parallelize`: makes a model run as planned."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import GraphError, LayoutError, PlanError
from autoshard.graph import Graph, graph_to_json, resized
from autoshard.layouts import Layout
from autoshard.plan import PlacedInput, PlacedOutput, Plan, Stage
from autoshard.runtime.constants import constant_value, prepared_inputs
from autoshard.runtime.dtensors import support_grad_scaler
from autoshard.runtime.parameters import (
    LocalParameter,
    ModuleAttribute,
    UpdatedBuffer,
    check_parameters,
    distribute_buffers,
    distribute_parameters,
)
from autoshard.runtime.program import LocalProgram
from autoshard.runtime.signature import Arguments, Results

ModelT = TypeVar("ModelT", bound=nn.Module)
PlacedT = TypeVar("PlacedT", PlacedInput, PlacedOutput)

_CACHED_PROGRAMS = 8
"""Size of the LRU cache of programs for dynamic sizes other than the planned ones."""


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

    The model is changed in place. Its parameters become DTensors with the planned placements and
    the same names, so that any optimizer, `torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler`
    and, through `dcp_state_dict`, `torch.distributed.checkpoint` work. Its forward becomes the
    planned program, which runs exactly the collectives of the plan.

    Forward takes the same arguments as when the model was exported. A tensor may be the full
    batch (each rank takes its shard), the rank's own shard, or a DTensor placed as planned.
    Replicated results are plain tensors, sharded ones are DTensors.

    Dynamic sizes (`torch.export.Dim`) may differ from the planned ones if tensors are full ones or
    DTensors and the planned layouts can shard the sizes. The plan's time and memory are for the
    planned sizes.

    `torch.compile(model, fullgraph=True)` supports the planned model, unless it draws random
    numbers. The compiler then decides what is saved for backward, and only the loss may have a
    gradient.

    A plan for inference computes no gradients, and runs under `torch.no_grad()`. Dropout and
    batch norm behave as in the exported program: `train()` and `eval()` have no effect.

    Args:
        model: a model with the full weights on every rank, or on the meta device if
            `load_checkpoint` loads them afterwards.
        plan: a plan made for this model and for a mesh of this shape.
        device_mesh: a mesh with the axis names and sizes of the plan.
        constants: values of tensors that forward created during export, by name; only needed for
            those that are neither attributes of the model nor small literals.
        custom_operators: custom operators that the plan may call, as torch names them
            (`mylib::gate`), or their namespaces (`mylib`). A plan may come from a server,
            so it may call only what is allowed here.
        seed: seed of random operators such as dropout; the same on all ranks. Random numbers
            depend on it and on the step, which `rng_step` adds to a checkpoint.

    Returns:
        The same object; its class is now a subclass of its former class.

    Raises:
        PlanError: the plan has no stage or several, or does not fit mesh or model. The model
            is then unchanged.
    """
    if isinstance(model, Planned):
        raise PlanError("the model is parallelized already; apply a plan to a new model")
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
    support_grad_scaler()
    return model


class Planned:
    """Mixin class of models that run as planned."""

    _planned_forward: "PlannedForward"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan with the arguments and results of the exported forward."""
        return self._planned_forward(args, kwargs)


def planned_forward(model: nn.Module) -> "PlannedForward":
    """The object that runs a planned model.

    Raises:
        PlanError: the model does not run as planned.
    """
    if not isinstance(model, Planned):
        raise PlanError(
            f"{type(model).__name__} does not run as planned; apply a plan with parallelize first"
        )
    return model._planned_forward  # noqa: SLF001  of this module


def rng_step(model: nn.Module) -> "RngStep":
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
    return RngStep(planned_forward(model))


class RngStep:
    """The step index of a planned model, as a stateful object for `torch.distributed.checkpoint`.

    Args:
        forward: the planned model's forward.
    """

    def __init__(self, forward: "PlannedForward") -> None:
        self._forward = forward

    @property
    def value(self) -> int:
        """The index of the next step: the number of calls of forward, also in evaluation.

        It can be set; the value must be the same on all ranks.

        Raises:
            PlanError: it is set to anything but a non-negative int.
        """
        return self._forward.step

    @value.setter
    def value(self, step: int) -> None:
        # The seed is a hash of the number's text, so 1.0 would be another seed than 1.
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise PlanError(f"the step cannot be {step!r}; it must be a non-negative int")
        self._forward.step = step

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The index as a tensor, which checkpoints store without pickle."""
        return {"value": torch.tensor(self.value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the index from a checkpoint.

        Raises:
            PlanError: the checkpoint has no valid step index.
        """
        found: Any = state.get("value")
        if isinstance(found, torch.Tensor) and not found.dim():
            found = found.item()
        self.value = found


class PlannedForward:
    """The program of a stage with its parameters, arguments and results.

    Args:
        stage: the plan's stage.
        compile_stage: compiles the stage, or its copy with other dynamic sizes.
        mesh: the devices.
        training: True if gradients are computed.
        constants: values of captured tensors that are not attributes of the model, by name.

    Attributes:
        step: index of the next step.
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
        self._resized = lru_cache(_CACHED_PROGRAMS)(self._call_at)
        self._tensors: dict[str, Callable[[], torch.Tensor]] = {}
        self._updated: tuple[UpdatedBuffer, ...] = ()
        self.step = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedForward":
        """Copy parameters and buffers; the program is shared with the original."""
        copied = memo[id(self)] = copy(self)
        # The cached bound method would refer to the original.
        vars(copied)["_resized"] = lru_cache(_CACHED_PROGRAMS)(
            MethodType(PlannedForward._call_at, copied)
        )
        vars(copied)["_tensors"] = deepcopy(self._tensors, memo)
        vars(copied)["_updated"] = deepcopy(self._updated, memo)
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
        """The program at the planned sizes."""
        return self._planned.program

    @property
    def arguments(self) -> Arguments:
        """The arguments of forward."""
        return self._planned.arguments

    def _call_of(self, stage: Stage) -> "_Call":
        program = self._compile(stage)
        return _Call(
            program,
            Arguments(stage, program.graph, program.place),
            Results(stage, program.graph, self._mesh),
            prepared_inputs(program.graph, stage, program.place),
        )

    def _call_at(self, sizes: tuple[tuple[str, int], ...]) -> "_Call":
        """Compile the program for other dynamic sizes."""
        program = self.program
        try:
            stage = _resized_stage(
                self._stage, program.graph, dict(sizes), program.place.axis_sizes
            )
            return self._call_of(stage)
        except PlanError as error:
            raise PlanError(
                f"the plan does not run with tensors of these sizes: {error}; pad them, or make a "
                f"plan for these sizes"
            ) from error

    def attach(self, model: nn.Module) -> None:
        """Distribute a model's parameters and find its buffers and constants.

        Raises:
            PlanError: a buffer or a constant is missing. The model's parameters are unchanged.
        """
        for placed in self._stage.inputs:
            if placed.kind in ("buffer", "constant"):
                self._tensors[placed.name] = self._find(model, placed)
        updated = distribute_buffers(model, self._stage, self._mesh, self.program.place)
        self._tensors.update((name, buffer.get) for name, buffer in updated.items())
        self._updated = tuple(updated.values())
        parameters = distribute_parameters(model, self._stage, self._mesh, self.program.place)
        for placed, parameter in zip(self._stage.parameters, parameters, strict=True):
            self._tensors[placed.name] = LocalParameter(parameter).get

    def _find(self, model: nn.Module, placed: PlacedInput) -> Callable[[], torch.Tensor]:
        device = self.program.place.device
        if placed.target in self._constants:
            value = self._constants[placed.target].to(device)
            return lambda: value
        try:
            attribute = ModuleAttribute.of(model, placed.target)
            value = attribute.get()
        except AttributeError:
            known = constant_value(self.program.graph, placed.name, device)
            if known is not None:
                return lambda: known
            raise PlanError(
                f"the model has no {placed.kind} {placed.target!r}; pass its value in "
                f"`constants`, as in exported_program.constants"
            ) from None
        if not isinstance(value, torch.Tensor) or value.shape != placed.shape:
            raise PlanError(
                f"{placed.target!r} is not a tensor of shape {placed.shape} in the model"
            )
        if not value.is_meta:
            setattr(attribute.module, attribute.name, value.to(device))
        return attribute.get

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one step on this rank.

        Raises:
            PlanError: the arguments do not fit, or the program draws random numbers and is
                compiled or recomputed in backward.
        """
        if self.program.is_random and torch.compiler.is_compiling():
            raise PlanError(
                "the planned model draws random numbers, which torch.compile cannot reproduce on "
                "all ranks: export the model with dropout 0, or run it uncompiled"
            )
        # A graph task runs on this thread only during backward.
        if self.program.is_random and torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            raise PlanError(
                "the planned model draws random numbers, so it cannot be recomputed in the "
                "backward pass: apply activation checkpointing inside the model, not around it"
            )
        with torch.set_grad_enabled(self._training and torch.is_grad_enabled()):
            # Only the program may reference shards that were copied to the device: it frees them.
            leaves = self.arguments.flatten(args, kwargs)
            sizes = self.arguments.sizes(leaves)
            call = self._resized(tuple(sizes.items())) if sizes else self._planned
            given = call.arguments.localize(leaves)
            inputs = (self._input(placed, given, call) for placed in self._stage.inputs)
            outputs = call.program(inputs, step=self.step)
            self.step += 1
            num_results = len(outputs) - len(self._updated)
            for buffer, contents in zip(self._updated, outputs[num_results:], strict=True):
                buffer.set(contents)
            return call.results.nest(outputs[:num_results])

    def _input(
        self, placed: PlacedInput, given: dict[str, torch.Tensor], call: "_Call"
    ) -> torch.Tensor:
        match placed.kind:
            case "user":
                return given.pop(placed.name)
            case "prepared":
                return call.prepared[placed.name]
        return self._tensors[placed.name]()


@dataclass(frozen=True, slots=True)
class _Call:
    """A program for tensors of certain sizes, with its arguments and results."""

    program: LocalProgram
    arguments: Arguments
    results: Results
    prepared: Mapping[str, torch.Tensor]


def _only_stage(plan: Plan) -> Stage:
    if not plan.found:
        raise PlanError(f"the document contains no plan to apply: {plan.reason}")
    if len(plan.stages) > 1:
        raise PlanError(
            f"the plan has {len(plan.stages)} pipeline stages; apply each stage to its part "
            f"of the model"
        )
    return plan.stages[0]


def _resized_stage(
    stage: Stage, graph: Graph, sizes: Mapping[str, int], axis_sizes: Sequence[int]
) -> Stage:
    """A copy of the stage with other dynamic sizes and the planned layouts.

    Args:
        stage: the planned stage.
        graph: its program.
        sizes: the new size of each symbol.
        axis_sizes: size of each mesh axis.

    Raises:
        PlanError: the program does not support the sizes, or the layouts cannot shard them.
    """
    try:
        program = resized(graph, sizes)
        update = {
            "program": graph_to_json(program),
            "inputs": tuple(_resized(i, program, axis_sizes) for i in stage.inputs),
            "outputs": tuple(_resized(o, program, axis_sizes) for o in stage.outputs),
        }
    except GraphError as error:
        raise PlanError(f"the arguments do not fit the program: {error}") from error
    except LayoutError as error:
        raise PlanError(str(error)) from error
    _check_divisible(stage, graph, program, axis_sizes)
    return stage.model_copy(update=update)


def _check_divisible(
    stage: Stage, planned: Graph, resized: Graph, axis_sizes: Sequence[int]
) -> None:
    """Raise `PlanError` if a new size is sharded unevenly but the planned one is not.

    Not every operator supports uneven shards, and rules were evaluated for the planned sizes.
    """
    for node in stage.nodes:
        call = planned.nodes[planned.numbers[node.name]]
        layouts = zip((*call.inputs, *call.outputs), (*node.inputs, *node.outputs), strict=True)
        for value, text in layouts:
            layout = Layout.parse(text)
            before, now = planned.values[value].shape, resized.values[value].shape
            parts = [layout.num_parts(dim, axis_sizes) for dim in range(len(now))]
            if any(
                size % n and not old % n for size, old, n in zip(now, before, parts, strict=True)
            ):
                raise PlanError(
                    f"layout {text} of {value!r} does not divide shape {now} over axes of "
                    f"{tuple(axis_sizes)}"
                )


def _resized(placed: PlacedT, graph: Graph, axis_sizes: Sequence[int]) -> PlacedT:
    shape = graph.values[placed.name].shape
    local = Layout.parse(placed.layout).local_shape(shape, axis_sizes)
    return placed.model_copy(update={"shape": shape, "local_shape": local})
