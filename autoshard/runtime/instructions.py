"""Executable instructions of one rank: lowered instructions with their kernels and collectives."""

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
"""The tensors that are alive, and the buckets that are pending, by slot."""


@dataclass(slots=True, kw_only=True)
class Instruction(ABC):
    """One instruction of a rank.

    Attributes:
        reads: slots of its inputs.
        targets: slots of its outputs.
        last_reads: the slots among `reads` that nothing reads afterwards.
        unread: the slots among `targets` that nothing reads.
        writes: positions in `reads` of the tensors that it changes in place.
    """

    reads: tuple[int, ...]
    targets: tuple[int, ...]
    last_reads: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()

    @abstractmethod
    def run(self, tensors: list[Any], step: int, regathers: Regathers) -> Sequence[Any]:
        """Make `targets` of `reads`.

        Args:
            tensors: the inputs. Nothing else references the list, so it may be emptied early.
            step: number of the training step.
            regathers: collects what backward reshards again.
        """


@dataclass(slots=True, kw_only=True)
class Reshard(Instruction):
    """Bring a tensor into another layout.

    Attributes:
        use: the use of a value that it is for.
        steps: of the resharding; at least one.
        regather: whether backward reshards again.
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
        regathers: Regathers,  # noqa: ARG002  likewise
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
        regather: whether backward reshards again.
    """

    steps: BucketSteps
    regather: bool

    def run(
        self,
        tensors: list[Any],
        step: int,  # noqa: ARG002  the base's signature
        regathers: Regathers,
    ) -> Sequence[Any]:
        """Wait for the first collective, and run the others."""
        (bucket,) = tensors
        if torch.compiler.is_compiling():
            # Each by itself; a compiler fuses collectives as it sees fit.
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
        shapes: local shape of each output; None for a size that depends on data.
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

    def _check(self, shape: torch.Size, wanted: tuple[int | None, ...]) -> None:
        """Sizes that depend on data may be any."""
        known = (s if w is not None else None for s, w in zip(shape, wanted, strict=False))
        assert tuple(known) == wanted, f"{self.node} made {tuple(shape)}, not {wanted}"


@dataclass(slots=True, kw_only=True)
class Recompute(Instruction):
    """A checkpoint: instructions of which only the inputs are saved for backward.

    Backward runs them again, in order, until every tensor that autograd saved is there. Tensors
    that they change in place are left as they are then: the step has changed them already.

    Attributes:
        instructions: in order; none of them is `regather`.
    """

    instructions: tuple[Instruction, ...]

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Self:
        """A checkpoint that reads what its instructions read from outside, and makes all."""
        made: set[int] = set()
        enters: set[int] = set()
        for instruction in instructions:
            enters.update(set(instruction.reads) - made)
            made.update(instruction.targets)
        return cls(
            reads=tuple(sorted(enters)),
            targets=tuple(sorted(made)),
            instructions=tuple(instructions),
        )

    def run(
        self, tensors: list[torch.Tensor], step: int, regathers: Regathers
    ) -> Sequence[torch.Tensor]:
        """Run the instructions."""
        if torch.compiler.is_compiling():
            return self._run(count(), step, *tensors)
        # What enters is saved like the inputs of an operator: it may be gathered again.
        with regathers.saving(tensors):
            # Random numbers follow from the step, not from the state of a generator.
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
    """Run instructions; a register is freed after its last reader.

    Args:
        instructions: in order, with their last reads marked.
        registers: inputs of the instructions; afterwards what is read behind them.
        step: number of the training step.
        recomputing: whether the step has run them before, so that they change copies in place.
    """
    regathers = Regathers()
    for instruction in instructions:
        if recomputing:
            for position in instruction.writes:
                slot = instruction.reads[position]
                registers[slot] = registers[slot].clone()
        _run_one(instruction, registers, step, regathers)
    regathers.forget()


def _run_one(
    instruction: Instruction, registers: Registers, step: int, regathers: Regathers
) -> None:
    """Run one instruction; no local variable references its outputs afterwards."""
    tensors = [registers[slot] for slot in instruction.reads]
    for slot in instruction.last_reads:
        del registers[slot]
    made = instruction.run(tensors, step, regathers)
    registers.update(zip(instruction.targets, made, strict=True))
    for slot in instruction.unread:
        del registers[slot]


def mark_last_reads(instructions: Sequence[Instruction], kept: Iterable[int]) -> frozenset[int]:
    """Set `last_reads` and `unread` of instructions by liveness analysis.

    Args:
        instructions: in order; a checkpoint among them makes only what is read after it.
        kept: slots that are read after all of them.

    Returns:
        The slots that must be there before them.
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
