"""The programs of a planned model: what a call of forward runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import lru_cache
from inspect import Signature
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import GraphError, LayoutError, PlanError
from autoshard.graph import Graph, graph_to_json, resized
from autoshard.layouts import Layout
from autoshard.plan import PlacedInput, PlacedOutput, Stage
from autoshard.runtime.checks.call_checks import (
    ParameterCheck,
    check_no_transform,
    compare_over_ranks,
)
from autoshard.runtime.parameters.local_parameters import (
    LocalParameters,
    gradients_to_copy,
    parameter_groups,
)
from autoshard.runtime.parameters.parameters import (
    ModuleAttribute,
    PlannedBuffer,
    StoredBuffer,
    store_updates,
)
from autoshard.runtime.program.accumulation import GradientAccumulation
from autoshard.runtime.program.constants import (
    HeldConstant,
    check_held,
    constant_value,
    prepared_inputs,
)
from autoshard.runtime.program.local_program import LocalProgram
from autoshard.runtime.program.random_numbers import RECOMPUTED
from autoshard.runtime.python_state.state import PythonState
from autoshard.runtime.signature import Arguments, Results, ShapeError
from autoshard.torch_private import compiled, has_compiler, runs_backward

PlacedT = TypeVar("PlacedT", PlacedInput, PlacedOutput)

_CACHED_PROGRAMS = 8
"""Size of the LRU cache of programs for dynamic sizes other than the planned ones."""


class RngStep:
    """Index of the next step of a planned model, stateful for `torch.distributed.checkpoint`."""

    def __init__(self) -> None:
        self._value = 0

    @property
    def value(self) -> int:
        """The index of the next step: the number of calls of forward, also in evaluation.

        It can be set; the value must be the same on all ranks.

        Raises:
            PlanError: it is set to anything but a non-negative int.
        """
        return self._value

    @value.setter
    def value(self, step: int) -> None:
        # The seed is a hash of the number's text, so 1.0 would be another seed than 1.
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise PlanError(f"the step cannot be {step!r}; it must be a non-negative int")
        self._value = step

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
        signature: signature of the model's forward.
        steps: index of the next step, shared by the programs of a model.
        accumulation: gradients that are not reduced yet, shared likewise.
    """

    def __init__(
        self,
        stage: Stage,
        compile_stage: Callable[[Stage], LocalProgram],
        mesh: DeviceMesh,
        *,
        training: bool,
        constants: dict[str, torch.Tensor],
        signature: Signature,
        steps: RngStep,
        accumulation: GradientAccumulation,
    ) -> None:
        self._signature = signature
        self._steps = steps
        self._accumulation = accumulation
        self._stage = stage
        self._compile = compile_stage
        self._mesh = mesh
        self._training = training
        self._constants = constants
        self._planned = self._call_of(stage)
        self._resized = lru_cache(_CACHED_PROGRAMS)(self._call_at)
        self._parameters: LocalParameters
        self._tensors: dict[int, Callable[[], torch.Tensor]] = {}  # buffers and constants, by slot
        self._updated: tuple[StoredBuffer, ...] = ()
        self._compared: set[tuple[Any, ...]] = set()  # shapes of arguments that ranks compared

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedForward":
        """Copy parameters and buffers; the program is shared with the original."""
        copied = memo[id(self)] = copy(self)
        # The cached bound method would refer to the original.
        vars(copied)["_resized"] = lru_cache(_CACHED_PROGRAMS)(
            MethodType(PlannedForward._call_at, copied)
        )
        vars(copied)["_parameters"] = deepcopy(self._parameters, memo)
        vars(copied)["_tensors"] = deepcopy(self._tensors, memo)
        vars(copied)["_updated"] = deepcopy(self._updated, memo)
        vars(copied)["_steps"] = deepcopy(self._steps, memo)
        vars(copied)["_accumulation"] = memo.setdefault(
            id(self._accumulation), GradientAccumulation(self._accumulation.dtype)
        )
        return copied

    @property
    def steps(self) -> RngStep:
        """Index of the next step."""
        return self._steps

    @property
    def accumulation(self) -> GradientAccumulation:
        """Gradients that are not reduced yet."""
        return self._accumulation

    @property
    def mesh(self) -> DeviceMesh:
        """The devices."""
        return self._mesh

    @property
    def stage(self) -> Stage:
        """The stage of the plan."""
        return self._stage

    @property
    def is_training(self) -> bool:
        """True if the program computes gradients."""
        return self._training

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters for which a training plan computes no gradient."""
        if not self._training:
            return frozenset()
        values = self.program.graph.values
        return frozenset(p.name for p in self._stage.parameters if not values[p.name].requires_grad)

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
        prepared = prepared_inputs(program.graph, stage, program.place)
        return _Call(
            program,
            Arguments(stage, program.graph, program.place, self._mesh, self._signature),
            Results(stage, program.graph, self._mesh),
            tuple(prepared.get(placed.name) for placed in stage.inputs),
            gradients_to_copy(program, stage.inputs),
        )

    def _call_at(self, sizes: tuple[tuple[str, int], ...]) -> "_Call | ShapeError":
        """Compile the program for other dynamic sizes, or say why it does not run with them."""
        program = self.program
        try:
            stage = _resized_stage(
                self._stage, program.graph, dict(sizes), program.place.axis_sizes
            )
            return self._call_of(stage)
        except PlanError as error:
            return ShapeError(f"the plan does not run with tensors of these sizes: {error}")

    def check_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check that the program is for the arguments of a call.

        Raises:
            PlanError: they do not fit.
        """
        self.arguments.check(self.arguments.flatten(args, kwargs))

    def attach(self, model: nn.Module) -> None:
        """Find the parameters, buffers and constants of a model; it is not changed.

        Raises:
            PlanError: a buffer or a constant is missing.
        """
        slots = {placed.name: slot for slot, placed in enumerate(self._stage.inputs)}
        for placed in self._stage.inputs:
            if placed.kind in ("buffer", "constant"):
                self._tensors[slots[placed.name]] = self._find(model, placed)
        parameters = {slots[p.name]: p for p in self._stage.parameters}
        self._parameters = LocalParameters(
            {slot: ModuleAttribute.of(model, p.target) for slot, p in parameters.items()},
            list(parameter_groups(self.program, self._stage.inputs)),
            ParameterCheck(parameters, frozenset(slots[name] for name in self.frozen)),
            [
                {name: ModuleAttribute.of(model, name) for name in (p.target, *p.aliases)}
                for p in self._stage.parameters
                if p.aliases
            ],
        )
        updated = [slots[o.updates] for o in self._stage.outputs if o.updates is not None]
        self._updated = tuple(
            StoredBuffer(
                ModuleAttribute.of(model, placed.target), self._as_planned(placed), updated=True
            )
            for placed in (self._stage.inputs[slot] for slot in updated)
        )
        buffers = zip(updated, self._updated, strict=True)
        self._tensors.update((slot, buffer.get) for slot, buffer in buffers)

    def _find(self, model: nn.Module, placed: PlacedInput) -> Callable[[], torch.Tensor]:
        device = self.program.place.device
        if placed.target in self._constants:
            value = self._constants[placed.target].to(device)
            return lambda: value
        if placed.kind == "constant":
            return self._find_constant(model, placed)
        try:
            attribute = ModuleAttribute.of(model, placed.target)
            buffer = attribute.get()
        except AttributeError:
            raise PlanError(f"the model has no buffer {placed.target!r}") from None
        check_held(buffer, placed)
        if not buffer.is_meta:
            setattr(attribute.module, attribute.name, buffer.to(device))
        return StoredBuffer(attribute, self._as_planned(placed)).get

    def _as_planned(self, placed: PlacedInput) -> PlannedBuffer:
        return PlannedBuffer(placed, self._mesh, self.program.place)

    def _find_constant(self, model: nn.Module, placed: PlacedInput) -> Callable[[], torch.Tensor]:
        device = self.program.place.device
        held = HeldConstant.of(model, placed, device)
        if held is not None:
            return held.get
        known = constant_value(self.program.graph, placed.name, device)
        if known is None:
            raise PlanError(
                f"the model has no constant {placed.target!r}; pass its value to parallelize, "
                f"constants={{{placed.target!r}: tensor}}, as exported_program.constants has it, "
                f"or export the model with export_model, which finds or keeps it"
            )
        return lambda: known

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one step on this rank.

        Raises:
            PlanError: the arguments do not fit, or the program draws random numbers and is
                recomputed in backward.
            ShapeError: the plan has no program for the shapes of the arguments.
        """
        if self.program.is_random and runs_backward():
            raise PlanError(RECOMPUTED)
        with torch.set_grad_enabled(self._training and torch.is_grad_enabled()):
            leaves = self.arguments.flatten(args, kwargs)
            sizes = self.arguments.sizes(leaves)
            call = self._resized(tuple(sizes.items())) if sizes else self._planned
            if isinstance(call, ShapeError):
                raise call
            given = call.arguments.localize(leaves)
            self._check_arguments(call, leaves)
            outputs = self._run(call, given)
            return call.results.nest(store_updates(self._updated, outputs))

    def _inputs(self, call: "_Call", given: dict[int, torch.Tensor]) -> Iterator[Any]:
        """This rank's shards of the stage's inputs, in order.

        Only the program may reference shards that were copied to the device: it frees them.
        """
        inputs: list[Any] = list(call.prepared)
        for slot in tuple(given):
            inputs[slot] = given.pop(slot)
        for slot, get in self._tensors.items():
            inputs[slot] = get()
        self._parameters.fill(inputs, call.copied_gradients)
        return iter(inputs)

    def _run(self, call: "_Call", given: dict[int, torch.Tensor]) -> tuple[Any, ...]:
        step = self._steps.value
        with self._accumulation.forward():
            if has_compiler():
                # A tensor, since a compiler would compile again for each value of an int.
                inputs = tuple(self._inputs(call, given))
                outputs = compiled(call.program.run_compiled, inputs, torch.tensor(step))
            else:
                outputs = call.program(self._inputs(call, given), step=step)
        self._steps.value = step + 1
        return outputs

    def _check_arguments(self, call: "_Call", leaves: Sequence[Any]) -> None:
        """Check what is passed again, and compare ranks, once for each set of shapes."""
        call.arguments.check_passed_again(leaves)
        shapes = tuple([(type(x), x.shape) for x in leaves if isinstance(x, torch.Tensor)])
        if shapes in self._compared:
            return
        self._compared.add(shapes)
        regions = call.arguments.regions(leaves)
        if regions:
            compare_over_ranks(regions, self._mesh)


class Programs:
    """The programs of a model, of which each call runs one.

    Args:
        by_name: at least one.
        state: the Python state that they were exported in.

    Attributes:
        state: likewise.
        num_calls: how often one was called.
    """

    def __init__(self, by_name: Mapping[str, PlannedForward], state: PythonState) -> None:
        self._by_name = dict(by_name)
        self.state = state
        self.num_calls = 0

    @property
    def train(self) -> bool:
        """True if a program computes gradients."""
        return any(forward.is_training for forward in self._by_name.values())

    @property
    def first(self) -> PlannedForward:
        """The program that was given first."""
        return next(iter(self._by_name.values()))

    @property
    def all(self) -> tuple[PlannedForward, ...]:
        """The programs in the order in which they were given."""
        return tuple(self._by_name.values())

    def choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> PlannedForward:
        """The program for a call: its arguments fit, and its state is that of the model.

        Raises:
            PlanError: none fits; the message says why, by name.
            ShapeError: one would fit if it were not for the shapes of tensors.
        """
        self.num_calls += 1
        check_no_transform()
        if len(self._by_name) == 1:
            self.state.check(model, next(iter(self._by_name)))
            return self.first
        fitting, reasons, only_shapes = [], [], False
        for name, forward in self._by_name.items():
            try:
                self.state.check(model, name)
                forward.check_call(args, kwargs)
                fitting.append(forward)
            except PlanError as error:
                reasons.append(f"{name}: {error}")
                only_shapes |= isinstance(error, ShapeError)
        if not fitting:
            reason = f"no plan is for this call: {'; '.join(reasons)}"
            raise ShapeError(reason) if only_shapes else PlanError(reason)
        return next((f for f in fitting if f.is_training == model.training), fitting[0])


@dataclass(frozen=True, slots=True)
class _Call:
    """A program for tensors of certain sizes, with its arguments and results.

    Attributes:
        program: the program.
        arguments: of forward.
        results: of forward.
        prepared: for each input of the stage, the tensor if it was computed in advance.
        copied_gradients: slots of parameters, from `gradients_to_copy`.
    """

    program: LocalProgram
    arguments: Arguments
    results: Results
    prepared: tuple[torch.Tensor | None, ...]
    copied_gradients: frozenset[int]


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
        if graph.dynamic is not None:
            graph.dynamic.check_special(sizes)
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
