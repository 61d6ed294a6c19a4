"""Gradients of several micro-batches that are reduced over ranks once, after the last of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch

from autoshard.errors import PlanError

Gradients: TypeAlias = list[torch.Tensor | None]


class GradientAccumulation:
    """The gradients of one planned model that are not reduced yet.

    Attributes:
        waits: True within `no_sync`: backward adds to the gradients instead of reducing them.
    """

    def __init__(self) -> None:
        self.waits = False
        self._unreduced: dict[int, Gradients] = {}  # by bucket
        self._reduces = False  # the last forward was outside of no_sync

    def keep(self, bucket: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of a bucket, to be reduced with those of a later micro-batch.

        Args:
            bucket: key of the bucket.
            gradients: of this micro-batch; None for each tensor that it has none for.
        """
        before = self._unreduced.get(bucket, [None] * len(gradients))
        # Other nodes may read the tensors that autograd passes, so the first ones are copied.
        self._unreduced[bucket] = [
            old if new is None else new.clone() if old is None else old.add_(new)
            for old, new in zip(before, gradients, strict=True)
        ]

    def take(self, bucket: int, gradients: Sequence[torch.Tensor | None]) -> Gradients:
        """The gradients of a bucket with those that wait for them, which are reduced now."""
        before = self._unreduced.pop(bucket, [None] * len(gradients))
        return [
            new if old is None else old if new is None else old.add_(new)
            for old, new in zip(before, gradients, strict=True)
        ]

    def check_reduced(self) -> None:
        """Check that gradients do not wait for this call, whose backward pass has no reductions.

        Raises:
            PlanError: they do.
        """
        if self._unreduced and not self.waits and torch.is_grad_enabled():
            raise PlanError(
                "gradients of micro-batches under no_sync() wait for a backward pass of the plan, "
                "and this call runs unsharded: make it under no_sync(), and a call with the "
                "planned shapes the last of the step"
            )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context in which the buckets of a call of forward accumulate here.

        Raises:
            PlanError: gradients of the step before were never reduced.
        """
        if torch.is_grad_enabled():
            if self.waits and self._reduces and self._unreduced:
                self._unreduced.clear()
                raise PlanError(
                    "gradients of micro-batches under no_sync() were never reduced, since the "
                    "backward pass of the last micro-batch did not reach their parameters: every "
                    "step must end with a backward pass outside of no_sync() that does"
                )
            self._reduces = not self.waits
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose calls of forward have gradients that are not reduced."""
        before, self.waits = self.waits, True
        try:
            yield
        finally:
            self.waits = before


_ACTIVE: ContextVar[GradientAccumulation | None] = ContextVar("active", default=None)


def active_accumulation() -> GradientAccumulation | None:
    """Where the model whose forward runs accumulates gradients; None outside of a model."""
    return _ACTIVE.get()
