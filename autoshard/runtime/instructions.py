"""What a rank does for a stage, one thing after the other."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import torch
from torch.utils.checkpoint import checkpoint

from autoshard.plan.document import Use
from autoshard.runtime.buckets import BucketSteps, Crossing
from autoshard.runtime.local_node import LocalKernel
from autoshard.runtime.regather import Regathers
from autoshard.runtime.resharding import LocalFunction

Registers = dict[int, Any]
"""The tensors that are alive, and the buckets that are under way, by slot."""


@dataclass(slots=True, kw_only=True)
class Instruction(ABC):
    """One thing that a rank does.

    Attributes:
        reads: slots of what it takes.
        targets: slots of what it makes.
        last_reads: the slots among `reads` that nothing reads afterwards.
        unread: the slots among `targets` that nothing reads.
        writes: places in `reads` of what running it changes.
    """

    reads: tuple[int, ...]
    targets: tuple[int, ...]
    last_reads: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()

    @abstractmethod
    def run(self, tensors: list[Any], step: int, again: Regathers) -> Sequence[Any]:
        """Make `targets` of `reads`.

        Args:
            tensors: what it takes. Nobody else needs the list, so it may let go of them early.
            step: number of the training step.
            again: what backward reshards once more.
        """


@dataclass(slots=True, kw_only=True)
class Reshard(Instruction):
    """Bring a tensor into another layout.

    Attributes:
        use: what it is for.
        steps: of the resharding; at least one.
        again: whether backward reshards once more.
    """

    use: Use
    steps: tuple[LocalFunction, ...]
    again: bool

    def run(
        self,
        tensors: list[torch.Tensor],
        step: int,  # noqa: ARG002  the base's signature
        again: Regathers,
    ) -> Sequence[torch.Tensor]:
        """Run the steps."""
        tensor = tensors.pop()
        sources = (tensor,) if self.again else ()
        for reshard in self.steps:
            tensor = reshard(tensor)
        if sources and not torch.compiler.is_compiling():
            again.add(sources, (tensor,), self._reshard)
        return (tensor,)

    def _reshard(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        (tensor,) = tensors
        for reshard in self.steps:
            tensor = reshard(tensor)
        return (tensor,)


@dataclass(slots=True, kw_only=True)
class Begin(Instruction):
    """Begin the reshardings of a bucket.

    Attributes:
        steps: that all of them run.
    """

    steps: BucketSteps

    def run(
        self,
        tensors: list[Any],
        step: int,  # noqa: ARG002  the base's signature
        again: Regathers,  # noqa: ARG002  likewise
    ) -> Sequence[Any]:
        """Start the first collective."""
        if torch.compiler.is_compiling():
            return (tuple(tensors),)
        crossing = Crossing(self.steps)
        crossing.begin(tensors)
        return (crossing,)


@dataclass(slots=True, kw_only=True)
class End(Instruction):
    """Wait for the reshardings of a bucket.

    Attributes:
        steps: that all of them run.
        again: whether backward reshards once more.
    """

    steps: BucketSteps
    again: bool

    def run(
        self,
        tensors: list[Any],
        step: int,  # noqa: ARG002  the base's signature
        again: Regathers,
    ) -> Sequence[Any]:
        """Wait for the first collective, and run the others."""
        (crossing,) = tensors
        if torch.compiler.is_compiling():
            return self._separately(crossing)
        assert isinstance(crossing, Crossing)
        resharded = crossing.end()
        if self.again:
            again.add(crossing.sources, resharded, crossing.reshard)
        return resharded

    def _separately(self, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Each resharding by itself; a compiler puts collectives together as it sees fit."""
        resharded = []
        for source, steps in zip(sources, self.steps.separate, strict=True):
            tensor = source
            for reshard in steps:
                tensor = reshard(tensor)
            resharded.append(tensor)
        return resharded


@dataclass(slots=True, kw_only=True)
class Call(Instruction):
    """Run an operator.

    Attributes:
        node: name of the node.
        shapes: a rank's shape of each output; None for a size that is data.
        kernel: what runs.
    """

    node: str
    shapes: tuple[tuple[int | None, ...], ...]
    kernel: LocalKernel

    def run(
        self, tensors: list[torch.Tensor], step: int, again: Regathers
    ) -> Sequence[torch.Tensor]:
        """Run the kernel."""
        with again.saving(tensors):
            outputs = self.kernel(tensors, step)
        for output, shape in zip(outputs, self.shapes, strict=True):
            if output.shape != shape:
                self._check(output.shape, shape)
        return outputs

    def _check(self, shape: torch.Size, wanted: tuple[int | None, ...]) -> None:
        """Sizes that are data may be any."""
        known = (s if w is not None else None for s, w in zip(shape, wanted, strict=False))
        assert tuple(known) == wanted, f"{self.node} made {tuple(shape)}, not {wanted}"


@dataclass(slots=True, kw_only=True)
class Recompute(Instruction):
    """Run instructions of which backward holds only what they take.

    Backward runs them once more, in order, until all that they had saved is there. What they
    write into is then left as it is: the step has changed it already.

    Attributes:
        instructions: what runs; none of them is `again`.
    """

    instructions: tuple[Instruction, ...]

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Self:
        """Reads what the instructions read from outside, and makes all that they make."""
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
        self, tensors: list[torch.Tensor], step: int, again: Regathers
    ) -> Sequence[torch.Tensor]:
        """Run the instructions."""
        if torch.compiler.is_compiling():
            return self._run(count(), step, *tensors)
        # What enters is saved like the inputs of an operator: it may be resharded again.
        with again.saving(tensors):
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
        execute(self.instructions, registers, step, anew=next(runs) > 0)
        return tuple(registers[slot] for slot in self.targets)


def execute(
    instructions: Iterable[Instruction], registers: Registers, step: int, *, anew: bool = False
) -> None:
    """Run instructions; a register is free after its last reader.

    Args:
        instructions: in order, with their last reads marked.
        registers: what they read from outside; afterwards what is read behind them.
        step: number of the training step.
        anew: whether the step has run them before, so that what they write into stays.
    """
    again = Regathers()
    for instruction in instructions:
        if anew:
            _spare(instruction, registers)
        _advance(instruction, registers, step, again)
    again.forget()


def _spare(instruction: Instruction, registers: Registers) -> None:
    """Let an instruction write into copies."""
    for position in instruction.writes:
        slot = instruction.reads[position]
        registers[slot] = registers[slot].clone()


def _advance(instruction: Instruction, registers: Registers, step: int, again: Regathers) -> None:
    """Run one instruction; what it makes is held by no local variable afterwards."""
    tensors = [registers[slot] for slot in instruction.reads]
    for slot in instruction.last_reads:
        del registers[slot]
    made = instruction.run(tensors, step, again)
    registers.update(zip(instruction.targets, made, strict=True))
    for slot in instruction.unread:
        del registers[slot]


def mark_last_reads(instructions: Sequence[Instruction], kept: Iterable[int]) -> frozenset[int]:
    """Say of each instruction which slots nothing reads behind it.

    Args:
        instructions: in order; their `last_reads` and `unread` are set, and one that
            recomputes makes only what is read behind it.
        kept: slots that are read behind all of them.

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
