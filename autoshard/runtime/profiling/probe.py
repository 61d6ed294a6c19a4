"""Seconds of each operator and each step of a resharding while a program runs.

Kernels and steps are called through a probe. It measures the call, and hooks the autograd
nodes that the call makes, so that their backward counts for the same part of the plan. What
runs inside something that is measured (backward that first runs a part forward once more)
counts for itself only.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.autograd.graph import Node

from autoshard.plan import Resharding, Stage
from autoshard.plan.memory.schedule import Phase
from autoshard.plan.simulation import resharding_label
from autoshard.runtime.instructions import Call, Instruction, Recompute, Reshard
from autoshard.runtime.program import LocalProgram


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Something that runs.

    Attributes:
        phase: part of the step.
        name: of the operator, or of what a step of a resharding runs.
        subject: the node, or the value that is resharded and what for.
        axis: the mesh axis of a step; empty of an operator.
        nbytes: size of the larger of a rank's tensor before and after; 0 of an operator.
    """

    phase: str
    name: str
    subject: str
    axis: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Both:
    """What a call counts as forward, and what its backward does."""

    forward: Part
    backward: Part


@dataclass(slots=True)
class _Running:
    part: Part
    start: float
    inside: float = 0.0


@dataclass
class Probe:
    """Measures parts.

    Args:
        device: what they run on; it is waited for around each.

    Attributes:
        seconds: of each part in this step.
        starts: when each part first began, by `time.perf_counter`.
    """

    device: torch.device
    seconds: defaultdict[Part, float] = field(default_factory=lambda: defaultdict(float))
    starts: dict[Part, float] = field(default_factory=dict)
    _stack: list[_Running] = field(default_factory=list)
    _known: set[Node] = field(default_factory=set)

    def clear(self) -> None:
        """Begin a step."""
        self.seconds.clear()
        self.starts.clear()
        self._known.clear()

    def wrap(self, function: Callable[..., Any], both: Both) -> Callable[..., Any]:
        """The function, measured."""

        def measured(*args: Any) -> Any:
            backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  as in the recorder
            part = both.forward
            if backward:
                part = Part(Phase.RECOMPUTE, part.name, part.subject, part.axis, part.nbytes)
            before = None if backward else _grad_nodes(args)
            with self.measured(part):
                result = function(*args)
            if before is not None:
                self._known.update(before)
                self._hook(_grad_nodes([result]), both.backward)
            return result

        return measured

    def _hook(self, nodes: Iterable[Node], part: Part) -> None:
        """Measure the backward of what a call has made."""
        for node in _behind(nodes, self._known):
            self._known.add(node)
            node.register_prehook(lambda _: self._begin(part))
            node.register_hook(lambda *_: self._end())

    @contextmanager
    def measured(self, part: Part) -> Iterator[None]:
        """What runs inside counts as a part."""
        self._begin(part)
        try:
            yield
        finally:
            self._end()

    def _begin(self, part: Part) -> None:
        self._wait()
        now = perf_counter()
        self.starts.setdefault(part, now)
        self._stack.append(_Running(part, now))

    def _end(self) -> None:
        self._wait()
        running = self._stack.pop()
        passed = perf_counter() - running.start
        self.seconds[running.part] += passed - running.inside
        if self._stack:
            self._stack[-1].inside += passed

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _grad_nodes(values: Iterable[Any]) -> list[Node]:
    """The autograd nodes that made some tensors, which may be in lists."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            found.append(value.grad_fn)
        elif isinstance(value, (list, tuple)):
            found += _grad_nodes(value)
    return found


def _behind(nodes: Iterable[Node], known: set[Node]) -> Iterator[Node]:
    """Nodes from which these take their gradients onwards, up to those that are known."""
    open_nodes = list(nodes)
    seen = set(known)
    while open_nodes:
        node = open_nodes.pop()
        # The last node of a leaf only adds to its gradient.
        if node not in seen and node.name() != "torch::autograd::AccumulateGrad":
            seen.add(node)
            yield node
            open_nodes += [before for before, _ in node.next_functions if before is not None]


def instrument(program: LocalProgram, stage: Stage, probe: Probe) -> None:
    """Let a stage's program run its kernels and steps through a probe."""
    operators = {node.name: node.operator for node in program.graph.nodes}
    reshardings = {resharding.use: resharding for resharding in stage.reshardings}
    for instruction in _flat(program.instructions):
        if isinstance(instruction, Call):
            operator = operators[instruction.node]
            forward = Part(Phase.FORWARD, operator, instruction.node)
            backward = Part(Phase.BACKWARD, operator, instruction.node)
            instruction.kernel = probe.wrap(instruction.kernel, Both(forward, backward))
        elif isinstance(instruction, Reshard):
            parts = _step_parts(stage, reshardings[instruction.use])
            pairs = zip(instruction.steps, parts, strict=True)
            instruction.steps = tuple(probe.wrap(step, both) for step, both in pairs)


def _flat(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        yield instruction
        if isinstance(instruction, Recompute):
            yield from _flat(instruction.instructions)


def _step_parts(stage: Stage, resharding: Resharding) -> Iterator[Both]:
    sizes = dict(stage.axes)
    subject = resharding_label(resharding, {i.name: i.target for i in stage.inputs})
    for step in resharding.steps:
        if sizes[step.axis] > 1:
            yield Both(
                Part(Phase.FORWARD, step.forward, subject, step.axis, step.nbytes),
                Part(Phase.BACKWARD, step.backward, subject, step.axis, step.nbytes),
            )
