"""The instructions that a rank executes: lowered instructions bound to kernels and collectives.

Everything that is known before a run is in an instruction: the slots that it reads and writes, the
kernel with its constant arguments, the process groups. A run only moves tensors between slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import torch
from torch.utils.checkpoint import checkpoint

from autoshard.plan.stage import Use
from autoshard.runtime.program.buckets import BucketOp, BucketSteps
from autoshard.runtime.program.local_node import LocalKernel, Step
from autoshard.runtime.program.regather import Regathers
from autoshard.runtime.resharding import LocalFunction, run_steps

Registers = list[Any]
"""Tensors and pending buckets by slot; None before a slot is written and after its last read."""


@dataclass(slots=True)
class ProgramRun:
    """One run of instructions.

    Attributes:
        step: the training step.
        regathers: the reshardings that backward runs again.
        checks_shapes: True if the shapes of outputs are compared with the planned ones.
        checkpoints: False if what activation checkpoints would recompute is saved instead.
        apart: None, or the tensors whose gradients are computed apart, each with the leaf that
            an operator reads in its place.
    """

    step: Step
    regathers: Regathers
    checks_shapes: bool = True
    checkpoints: bool = True
    apart: list[tuple[torch.Tensor, torch.Tensor]] | None = None


@dataclass(slots=True, kw_only=True)
class Instruction(ABC):
    """One instruction of a rank.

    Attributes:
        reads: slots of its inputs.
        targets: slots of its outputs.
        last_reads: slots of `reads` that no later instruction reads.
        unread: slots of `targets` that no instruction reads.
        writes: positions in `reads` of the tensors that it changes in place.
    """

    reads: tuple[int, ...]
    targets: tuple[int, ...]
    last_reads: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()

    @abstractmethod
    def run(self, registers: Registers, execution: ProgramRun) -> None:
        """Run the instruction: read its inputs, free those that are read last, write its outputs.

        Args:
            registers: of the run.
            execution: the run.
        """

    def _take(self, registers: Registers) -> list[Any]:
        """The inputs; the caller has the only reference to those that are read last."""
        tensors = [registers[slot] for slot in self.reads]
        for slot in self.last_reads:
            registers[slot] = None
        return tensors

    def _put(self, registers: Registers, outputs: Iterable[Any]) -> None:
        """Write the outputs that are read later."""
        for slot, output in zip(self.targets, outputs, strict=True):
            registers[slot] = output
        for slot in self.unread:
            registers[slot] = None


@dataclass(slots=True, kw_only=True)
class Reshard(Instruction):
    """Reshard a tensor.

    Attributes:
        use: the use of a value for which it is resharded.
        steps: the steps of the resharding; at least one.
        regather: True if backward runs the resharding again instead of saving its result.
        reduces: True if the last step of backward is a collective.
    """

    use: Use
    steps: tuple[LocalFunction, ...]
    regather: bool
    reduces: bool

    def run(self, registers: Registers, execution: ProgramRun) -> None:
        """Run the steps."""
        tensor: torch.Tensor = self._take(registers).pop()
        sources = (tensor,) if self.regather else ()
        for reshard in self.steps:
            tensor = reshard(tensor)
        if sources and not torch.compiler.is_compiling():
            execution.regathers.add(
                sources, (tensor,), lambda tensors: [run_steps(self.steps, t) for t in tensors]
            )
        self._put(registers, (tensor,))


@dataclass(slots=True, kw_only=True)
class Begin(Instruction):
    """Begin the reshardings of a bucket.

    Attributes:
        steps: the collectives of the bucket.
    """

    steps: BucketSteps

    def run(self, registers: Registers, execution: ProgramRun) -> None:  # noqa: ARG002  the base's
        """Start the first collective."""
        tensors = self._take(registers)
        if torch.compiler.is_compiling():
            self._put(registers, (tuple(tensors),))
            return
        bucket = BucketOp(self.steps)
        bucket.begin(tensors)
        self._put(registers, (bucket,))


@dataclass(slots=True, kw_only=True)
class End(Instruction):
    """Wait for the reshardings of a bucket.

    Attributes:
        steps: the collectives of the bucket.
        regather: True if backward runs them again instead of saving their results.
    """

    steps: BucketSteps
    regather: bool

    def run(self, registers: Registers, execution: ProgramRun) -> None:
        """Wait for the first collective, run the others, and split the result."""
        (bucket,) = self._take(registers)
        if torch.compiler.is_compiling():
            # Not fused here: the compiler decides which collectives it fuses.
            pairs = zip(bucket, self.steps.separate, strict=True)
            self._put(registers, [run_steps(steps, source) for source, steps in pairs])
            return
        assert isinstance(bucket, BucketOp)
        resharded = bucket.end()
        if self.regather:
            execution.regathers.add(bucket.sources, resharded, bucket.reshard)
        self._put(registers, resharded)


@dataclass(slots=True, kw_only=True)
class RunOperator(Instruction):
    """Run an operator.

    Attributes:
        node: name of the node.
        shapes: local shape of each output; a size that depends on data is None.
        kernel: the local kernel.
        reads_regathered: True if an input may share memory with a result that is re-gathered.
        apart: positions in `reads` of tensors whose gradients can be computed apart.
    """

    node: str
    shapes: tuple[tuple[int | None, ...], ...]
    kernel: LocalKernel
    reads_regathered: bool = False
    apart: tuple[int, ...] = ()

    def run(self, registers: Registers, execution: ProgramRun) -> None:
        """Run the kernel."""
        tensors = [registers[slot] for slot in self.reads]
        for slot in self.last_reads:
            registers[slot] = None
        if execution.apart is not None:
            for position in self.apart:
                tensors[position] = _cut_off(tensors[position], execution.apart)
        if self.reads_regathered:
            with execution.regathers.saving(tensors):
                outputs = self.kernel(tensors, execution.step)
        else:
            outputs = self.kernel(tensors, execution.step)
        if execution.checks_shapes:
            self._check(outputs)
        for slot, output in zip(self.targets, outputs):  # noqa: B905  checked in the first run
            registers[slot] = output
        for slot in self.unread:
            registers[slot] = None

    def _check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Check the outputs' shapes, except for sizes that depend on data."""
        for output, planned in zip(outputs, self.shapes, strict=True):
            shape = tuple(output.shape)
            known = (s if p is not None else None for s, p in zip(shape, planned, strict=False))
            message = f"{self.node} returned shape {shape}, not {planned}"
            assert len(shape) == len(planned), message
            assert tuple(known) == planned, message


def _cut_off(tensor: torch.Tensor, apart: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """A leaf in place of a tensor that requires a gradient; others are returned unchanged."""
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    apart.append((tensor, leaf))
    return leaf


@dataclass(slots=True, kw_only=True)
class Recompute(Instruction):
    """Activation checkpointing: only the inputs of the instructions are saved for backward.

    Backward runs the instructions again, in order, until every tensor that autograd needs is
    computed. It works on copies of tensors that they change in place, since forward has changed
    those already.

    Attributes:
        instructions: the checkpointed instructions, in order; none has `regather` set.
        num_slots: number of registers that they need.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Self:
        """Checkpoint instructions; all slots that they write are targets."""
        written: set[int] = set()
        inputs: set[int] = set()
        for instruction in instructions:
            inputs.update(set(instruction.reads) - written)
            written.update(instruction.targets)
        return cls(
            reads=tuple(sorted(inputs)),
            targets=tuple(sorted(written)),
            instructions=tuple(instructions),
            num_slots=max(inputs | written) + 1,
        )

    def run(self, registers: Registers, execution: ProgramRun) -> None:
        """Run the instructions."""
        tensors = self._take(registers)
        if torch.compiler.is_compiling() or not execution.checkpoints:
            self._put(registers, self._run(count(), execution, *tensors))
            return
        # Inputs are saved like those of an operator, so they may be re-gathered in backward.
        with execution.regathers.saving(tensors):
            # Random numbers are seeded by the step, so no generator state has to be restored.
            outputs: Sequence[torch.Tensor] = checkpoint(
                self._run,
                count(),
                execution,
                *tensors,
                use_reentrant=False,
                preserve_rng_state=False,
                determinism_check="none",
            )
        self._put(registers, outputs)

    def _run(
        self, runs: Iterator[int], execution: ProgramRun, *tensors: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        registers: Registers = [None] * self.num_slots
        for slot, tensor in zip(self.reads, tensors, strict=True):
            registers[slot] = tensor
        # `checkpoint` calls this again in backward with the same arguments: the counter tells the
        # second call from the first.
        inner = ProgramRun(execution.step, Regathers(), execution.checks_shapes)
        execute(self.instructions, registers, inner, recomputing=next(runs) > 0)
        return tuple(registers[slot] for slot in self.targets)


def execute(
    instructions: Iterable[Instruction],
    registers: Registers,
    execution: ProgramRun,
    *,
    recomputing: bool = False,
) -> None:
    """Run instructions; each register is freed after its last read.

    Args:
        instructions: instructions in order, after `mark_last_reads`.
        registers: has the inputs; afterwards only the slots that `mark_last_reads` keeps.
        execution: the run.
        recomputing: True if the step has run them before; in-place changes then go to copies.
    """
    for instruction in instructions:
        if recomputing:
            for position in instruction.writes:
                slot = instruction.reads[position]
                registers[slot] = registers[slot].clone()
        instruction.run(registers, execution)
    execution.regathers.clear()


def mark_apart(instructions: Iterable[Instruction], slots: Iterable[int]) -> None:
    """Set `apart` of operators: their inputs that do not derive from some slots, of those that do.

    Args:
        instructions: instructions in order; changed in place.
        slots: of the tensors whose gradients are computed first.
    """
    derived = set(slots)
    for instruction in instructions:
        if derived.isdisjoint(instruction.reads):
            continue
        derived.update(instruction.targets)
        if isinstance(instruction, RunOperator):
            places = enumerate(instruction.reads)
            instruction.apart = tuple(place for place, slot in places if slot not in derived)


def mark_last_reads(instructions: Sequence[Instruction], kept: Iterable[int]) -> frozenset[int]:
    """Set `last_reads` and `unread` of instructions by liveness analysis.

    The targets of a checkpoint are reduced to the slots that are read after it.

    Args:
        instructions: instructions in order; changed in place.
        kept: slots that are read after the last instruction.

    Returns:
        The slots that must be filled before the first instruction.
    """
    alive = set(kept)
    for instruction in reversed(instructions):
        if isinstance(instruction, Recompute):
            instruction.targets = tuple(slot for slot in instruction.targets if slot in alive)
            mark_last_reads(instruction.instructions, instruction.targets)
        instruction.last_reads = tuple(set(instruction.reads) - alive)
        instruction.unread = tuple(set(instruction.targets) - alive)
        alive.difference_update(instruction.targets)
        alive.update(instruction.reads)
    return frozenset(alive)
