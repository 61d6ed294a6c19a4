"""The instructions that a rank executes: lowered instructions bound to kernels and collectives."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import torch
from torch.utils.checkpoint import checkpoint

from autoshard.plan.document import Use
from autoshard.runtime.buckets import BucketOp, BucketSteps
from autoshard.runtime.local_node import LocalKernel
from autoshard.runtime.regather import Regathers
from autoshard.runtime.resharding import LocalFunction, run_steps

Registers = dict[int, Any]
"""Live tensors and pending buckets, by slot."""


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
    def run(self, tensors: list[Any], step: int, regathers: Regathers) -> Sequence[Any]:
        """Run the instruction and return its outputs.

        Args:
            tensors: the inputs; the instruction may empty the list to free them early.
            step: index of the training step.
            regathers: collects the reshardings that backward runs again.
        """


@dataclass(slots=True, kw_only=True)
class Reshard(Instruction):
    """Reshard a tensor.

    Attributes:
        use: the use of a value for which it is resharded.
        steps: the steps of the resharding; at least one.
        regather: True if backward runs the resharding again instead of saving its result.
    """

    use: Use
    steps: tuple[LocalFunction, ...]
    regather: bool

    def run(
        self,
        tensors: list[torch.Tensor],
        step: int,  # noqa: ARG002  the base's signature
        regathers: Regathers,
    ) -> Sequence[torch.Tensor]:
        """Run the steps."""
        tensor = tensors.pop()
        sources = (tensor,) if self.regather else ()
        for reshard in self.steps:
            tensor = reshard(tensor)
        if sources and not torch.compiler.is_compiling():
            regathers.add(
                sources, (tensor,), lambda tensors: [run_steps(self.steps, t) for t in tensors]
            )
        return (tensor,)


@dataclass(slots=True, kw_only=True)
class Begin(Instruction):
    """Begin the reshardings of a bucket.

    Attributes:
        steps: the collectives of the bucket.
    """

    steps: BucketSteps

    def run(
        self,
        tensors: list[Any],
        step: int,  # noqa: ARG002  the base's signature
        regathers: Regathers,  # noqa: ARG002  the base's signature
    ) -> Sequence[Any]:
        """Start the first collective."""
        if torch.compiler.is_compiling():
            return (tuple(tensors),)
        bucket = BucketOp(self.steps)
        bucket.begin(tensors)
        return (bucket,)


@dataclass(slots=True, kw_only=True)
class End(Instruction):
    """Wait for the reshardings of a bucket.

    Attributes:
        steps: the collectives of the bucket.
        regather: True if backward runs them again instead of saving their results.
    """

    steps: BucketSteps
    regather: bool

    def run(
        self,
        tensors: list[Any],
        step: int,  # noqa: ARG002  the base's signature
        regathers: Regathers,
    ) -> Sequence[Any]:
        """Wait for the first collective, run the others, and return the full tensors."""
        (bucket,) = tensors
        if torch.compiler.is_compiling():
            # Not fused here: the compiler decides which collectives it fuses.
            pairs = zip(bucket, self.steps.separate, strict=True)
            return [run_steps(steps, source) for source, steps in pairs]
        assert isinstance(bucket, BucketOp)
        resharded = bucket.end()
        if self.regather:
            regathers.add(bucket.sources, resharded, bucket.reshard)
        return resharded


@dataclass(slots=True, kw_only=True)
class Call(Instruction):
    """Run an operator.

    Attributes:
        node: name of the node.
        shapes: local shape of each output; a size that depends on data is None.
        kernel: the local kernel.
    """

    node: str
    shapes: tuple[tuple[int | None, ...], ...]
    kernel: LocalKernel

    def run(
        self, tensors: list[torch.Tensor], step: int, regathers: Regathers
    ) -> Sequence[torch.Tensor]:
        """Run the kernel."""
        with regathers.saving(tensors):
            outputs = self.kernel(tensors, step)
        for output, shape in zip(outputs, self.shapes, strict=True):
            if output.shape != shape:
                self._check(output.shape, shape)
        return outputs

    def _check(self, shape: torch.Size, planned: tuple[int | None, ...]) -> None:
        """Check an output's shape, except for sizes that depend on data."""
        known = (s if p is not None else None for s, p in zip(shape, planned, strict=False))
        message = f"{self.node} returned shape {tuple(shape)}, not {planned}"
        assert tuple(known) == planned, message


@dataclass(slots=True, kw_only=True)
class Recompute(Instruction):
    """Activation checkpointing: only the inputs of the instructions are saved for backward.

    Backward runs the instructions again, in order, until every tensor that autograd needs is
    computed. It works on copies of tensors that they change in place, since forward has changed
    those already.

    Attributes:
        instructions: the checkpointed instructions, in order; none has `regather` set.
    """

    instructions: tuple[Instruction, ...]

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
        )

    def run(
        self, tensors: list[torch.Tensor], step: int, regathers: Regathers
    ) -> Sequence[torch.Tensor]:
        """Run the instructions."""
        if torch.compiler.is_compiling():
            return self._run(count(), step, *tensors)
        # Inputs are saved like those of an operator, so they may be re-gathered in backward.
        with regathers.saving(tensors):
            # Random numbers are seeded by the step, so no generator state has to be restored.
            outputs: Sequence[torch.Tensor] = checkpoint(
                self._run,
                count(),
                step,
                *tensors,
                use_reentrant=False,
                preserve_rng_state=False,
                determinism_check="none",
            )
        return outputs

    def _run(
        self, runs: Iterator[int], step: int, *tensors: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        registers = dict(zip(self.reads, tensors, strict=True))
        execute(self.instructions, registers, step, recomputing=next(runs) > 0)
        return tuple(registers[slot] for slot in self.targets)


def execute(
    instructions: Iterable[Instruction],
    registers: Registers,
    step: int,
    *,
    recomputing: bool = False,
) -> None:
    """Run instructions; each register is freed after its last read.

    Args:
        instructions: instructions in order, after `mark_last_reads`.
        registers: the inputs by slot; afterwards only the slots that `mark_last_reads` keeps.
        step: index of the training step.
        recomputing: True if the step has run them before; in-place changes then go to copies.
    """
    regathers = Regathers()
    for instruction in instructions:
        if recomputing:
            for position in instruction.writes:
                slot = instruction.reads[position]
                registers[slot] = registers[slot].clone()
        _run_one(instruction, registers, step, regathers)
    regathers.clear()


def _run_one(
    instruction: Instruction, registers: Registers, step: int, regathers: Regathers
) -> None:
    """Run one instruction; a separate function, so that no local variable keeps tensors alive."""
    tensors = [registers[slot] for slot in instruction.reads]
    for slot in instruction.last_reads:
        del registers[slot]
    made = instruction.run(tensors, step, regathers)
    registers.update(zip(instruction.targets, made, strict=True))
    for slot in instruction.unread:
        del registers[slot]


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
