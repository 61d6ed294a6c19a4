"""Forward of one pipeline stage for one micro-batch."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autoshard.runtime.parameters.parameters import store_updates
from autoshard.runtime.pipelining.deferred_norms import DeferredBatchNorms
from autoshard.runtime.planned_forward import PlannedForward

Checkpointing = Literal["always", "except_last", "never"]
"""For which micro-batches of a step the planned activation checkpoints run."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch, as a stage runs it.

    Attributes:
        step: index of the training step as if each micro-batch were one; seeds random numbers.
        waits: True if backward of another one comes later.
        keeps: True if forward of another one comes later.
        checkpoints: False if everything is saved for backward.
    """

    step: int
    waits: bool = False
    keeps: bool = False
    checkpoints: bool = True


class StageForward(PlannedForward):
    """The program of a pipeline stage with its parameters and buffers.

    See `PlannedForward` for the arguments.

    Attributes:
        norms: batch norms whose statistics are updated once per step; None if they are updated
            by each micro-batch.
    """

    norms: DeferredBatchNorms | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "StageForward":
        """Copy the state of the model; the program is shared with the original."""
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, StageForward)
        copied.norms = deepcopy(self.norms, memo)
        return copied

    def run(
        self,
        arguments: Sequence[Any],
        received: Mapping[str, torch.Tensor],
        micro_batch: MicroBatch,
        apart: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> Sequence[Any]:
        """Run forward of a micro-batch.

        Args:
            arguments: the arguments of forward that the program reads, of the micro-batch.
            received: this rank's shards of what the previous stage sends, by name.
            micro_batch: which one it is.
            apart: gets the tensors whose gradients are computed apart, if it is given.

        Returns:
            This rank's shards of what is sent to the next stage, or of the results of forward.

        Raises:
            PlanError: an argument does not fit.
        """
        call = self._planned
        given = call.arguments.localize(arguments)
        for slot, placed in enumerate(self.stage.inputs):
            if placed.kind == "received":
                given[slot] = received[placed.name]
        accumulation = self.accumulation.micro_batch(
            waits=micro_batch.waits, keeps=micro_batch.keeps
        )
        with torch.set_grad_enabled(self.is_training and torch.is_grad_enabled()), accumulation:
            if self.norms is not None:
                self.norms.begin_forward()
            outputs = call.program(
                self._inputs(call, given),
                step=micro_batch.step,
                checkpoints=micro_batch.checkpoints,
                apart=apart,
            )
            results = store_updates(self._updated, outputs)
            if self.norms is not None:
                self.norms.end_forward()
            return results

    def nest(self, results: Sequence[Any]) -> Any:
        """The results of forward as the model returns them."""
        return self._planned.results.nest(results)

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the user inputs that the program reads, in order."""
        return tuple(i.name for i in self.stage.inputs if i.kind == "user")
