"""Measures the time of each operator and each resharding step of a program.

Kernels and steps are called through a probe. It measures the call, and hooks the autograd nodes
that the call creates, so that their backward is attributed to the same operator or step. The time
of nested measurements (recomputation inside backward) is subtracted from the outer ones.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.autograd.graph import Node

from autoshard.launching import synchronize
from autoshard.lowering.timeline import Phase
from autoshard.plan import Resharding, Stage
from autoshard.pricing.simulation import resharding_label
from autoshard.runtime.program.instructions import Instruction, Recompute, Reshard, RunOperator
from autoshard.runtime.program.local_program import LocalProgram
from autoshard.torch_private import runs_backward


@dataclass(frozen=True, slots=True, order=True)
class ProfiledPart:
    """An operator, a step of a resharding, or the optimizer.

    Attributes:
        phase: phase of the training step.
        name: name of the operator, or the action of a resharding step.
        subject: the node, or the resharded value and its use.
        axis: mesh axis of a resharding step; empty for an operator.
        nbytes: bytes of the rank's tensor before or after the step, whichever is larger; 0 for an
            operator.
    """

    phase: str
    name: str
    subject: str
    axis: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class CallParts:
    """The parts to which the time of a call and of its backward is attributed."""

    forward: ProfiledPart
    backward: ProfiledPart


@dataclass(slots=True)
class _RunningPart:
    part: ProfiledPart
    start: float
    inside: float = 0.0


@dataclass
class StepProbe:
    """Measures the parts of a step.

    Args:
        device: synchronised before and after each part.

    Attributes:
        seconds: total duration of each part in this step.
        starts: `time.perf_counter` at the first start of each part.
    """

    device: torch.device
    seconds: defaultdict[ProfiledPart, float] = field(default_factory=lambda: defaultdict(float))
    starts: dict[ProfiledPart, float] = field(default_factory=dict)
    _stack: list[_RunningPart] = field(default_factory=list)
    _hooked: set[Node] = field(default_factory=set)

    def clear(self) -> None:
        """Start a new step."""
        self.seconds.clear()
        self.starts.clear()
        self._hooked.clear()

    def wrap(self, function: Callable[..., Any], parts: CallParts) -> Callable[..., Any]:
        """Wrap a function so that its calls and their backward are measured."""

        def measured(*args: Any) -> Any:
            backward = runs_backward()
            part = parts.forward
            if backward:
                part = ProfiledPart(
                    Phase.RECOMPUTE, part.name, part.subject, part.axis, part.nbytes
                )
            before = None if backward else _grad_nodes(args)
            with self.measured(part):
                result = function(*args)
            if before is not None:
                self._hooked.update(before)
                self._hook(_grad_nodes([result]), parts.backward)
            return result

        return measured

    def _hook(self, nodes: Iterable[Node], part: ProfiledPart) -> None:
        """Measure the backward of the autograd nodes that a call has created."""
        for node in _new_nodes(nodes, self._hooked):
            self._hooked.add(node)
            node.register_prehook(lambda _: self._begin(part))
            node.register_hook(lambda *_: self._end())

    @contextmanager
    def measured(self, part: ProfiledPart) -> Iterator[None]:
        """A context whose duration is attributed to a part."""
        self._begin(part)
        try:
            yield
        finally:
            self._end()

    def _begin(self, part: ProfiledPart) -> None:
        synchronize(self.device)
        now = perf_counter()
        self.starts.setdefault(part, now)
        self._stack.append(_RunningPart(part, now))

    def _end(self) -> None:
        synchronize(self.device)
        running = self._stack.pop()
        passed = perf_counter() - running.start
        self.seconds[running.part] += passed - running.inside
        if self._stack:
            self._stack[-1].inside += passed


def _grad_nodes(values: Iterable[Any]) -> list[Node]:
    """The autograd nodes of tensors, which may be in lists."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            found.append(value.grad_fn)
        elif isinstance(value, (list, tuple)):
            found += _grad_nodes(value)
    return found


def _new_nodes(nodes: Iterable[Node], known: set[Node]) -> Iterator[Node]:
    """Walk the autograd graph from some nodes towards the leaves, up to known nodes."""
    open_nodes = list(nodes)
    seen = set(known)
    while open_nodes:
        node = open_nodes.pop()
        # AccumulateGrad only adds to the gradient of a leaf.
        if node not in seen and node.name() != "torch::autograd::AccumulateGrad":
            seen.add(node)
            yield node
            open_nodes += [before for before, _ in node.next_functions if before is not None]


def instrument(program: LocalProgram, stage: Stage, probe: StepProbe) -> None:
    """Wrap the kernels and resharding steps of a program, in place."""
    operators = {node.name: node.operator for node in program.graph.nodes}
    reshardings = {resharding.use: resharding for resharding in stage.reshardings}
    for instruction in _flat(program.instructions):
        if isinstance(instruction, RunOperator):
            operator = operators[instruction.node]
            forward = ProfiledPart(Phase.FORWARD, operator, instruction.node)
            backward = ProfiledPart(Phase.BACKWARD, operator, instruction.node)
            parts = CallParts(forward, backward)
            instruction.kernel = probe.wrap(instruction.kernel, parts)
        elif isinstance(instruction, Reshard):
            each = _step_parts(stage, reshardings[instruction.use])
            pairs = zip(instruction.steps, each, strict=True)
            instruction.steps = tuple(probe.wrap(step, parts) for step, parts in pairs)


def _flat(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        yield instruction
        if isinstance(instruction, Recompute):
            yield from _flat(instruction.instructions)


def _step_parts(stage: Stage, resharding: Resharding) -> Iterator[CallParts]:
    sizes = dict(stage.axes)
    subject = resharding_label(resharding, {i.name: i.target for i in stage.inputs})
    for step in resharding.steps:
        if step.num_ranks(sizes) > 1:
            yield CallParts(
                ProfiledPart(Phase.FORWARD, step.forward, subject, step.axis, step.nbytes),
                ProfiledPart(
                    Phase.BACKWARD, step.backward, subject, step.axis, step.backward_nbytes
                ),
            )
