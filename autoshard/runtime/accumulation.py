"""State of a step between its micro-batches: gradients and gathered parameters."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self, TypeAlias
from weakref import ReferenceType, ref

import torch

from autoshard.errors import PlanError
from autoshard.torch_private import stored_shard, version_counter

Gradients: TypeAlias = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of gradients.

    Attributes:
        tensor: the sum.
        dtype: element type of the gradients.
    """

    tensor: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, gradient: torch.Tensor, dtype: torch.dtype | None) -> Self:
        return cls(gradient.to(dtype or gradient.dtype, copy=True), gradient.dtype)

    def add(self, gradient: torch.Tensor) -> Self:
        self.tensor.add_(gradient)
        return self

    def result(self) -> torch.Tensor:
        return self.tensor.to(self.dtype)


@dataclass(frozen=True, slots=True)
class _Version:
    """A DTensor at some time.

    Attributes:
        tensor: the DTensor, and the tensor with its shard, which may be replaced.
        whole: number of writes into the DTensor, the same on all ranks.
        shard: number of writes into the shard of this rank.
    """

    tensor: tuple[ReferenceType[torch.Tensor], ReferenceType[torch.Tensor]]
    whole: int
    shard: int

    @classmethod
    def of(cls, parameter: Any) -> Self:
        shard = stored_shard(parameter)
        counts = version_counter(parameter), version_counter(shard)
        return cls((ref(parameter), ref(shard)), *counts)

    def is_other_than(self, before: "_Version") -> bool:
        """True if it was replaced or written as a whole."""
        pairs = zip(self.tensor, before.tensor, strict=True)
        return self.whole != before.whole or any(one() is not old() for one, old in pairs)


class GradientAccumulation:
    """Gradients of one planned model that are not reduced yet, and its gathered parameters.

    Args:
        dtype: element type of the sums; that of the gradients if None.

    Attributes:
        waits: True within `no_sync`: backward adds to gradients that can wait.
        keeps: True within `no_sync`: gathered parameters are kept for later micro-batches.
        written: True if operators in place have written shards of parameters, and not the
            parameters, since they were gathered.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.waits = False
        self.keeps = False
        self._unreduced: dict[Hashable, Sequence[_Sum | None]] = {}  # by bucket
        self._gathered: dict[int, list[torch.Tensor]] = {}  # by bucket
        self._known: dict[Hashable, list[_Version]] = {}  # by program
        self.written = False
        self._reduces = False  # the last forward was outside of no_sync

    def summed(
        self, bucket: Hashable, gradients: Sequence[torch.Tensor | None], *, waits: bool
    ) -> Gradients | None:
        """Gradients with those of earlier micro-batches; None if they wait for a later one.

        Args:
            bucket: key of the gradients.
            gradients: of this micro-batch; None for each tensor that it has none for.
            waits: True if the micro-batch is not the last one.
        """
        if waits:
            self._keep(bucket, gradients)
            return None
        return self._take(bucket, gradients)

    def _keep(self, bucket: Hashable, gradients: Sequence[torch.Tensor | None]) -> None:
        before = self._unreduced.get(bucket, [None] * len(gradients))
        # Other nodes may read the tensors that autograd passes, so the first ones are copied.
        self._unreduced[bucket] = [
            old if new is None else _Sum.of(new, self.dtype) if old is None else old.add(new)
            for old, new in zip(before, gradients, strict=True)
        ]

    def _take(self, bucket: Hashable, gradients: Sequence[torch.Tensor | None]) -> Gradients:
        before = self._unreduced.pop(bucket, [None] * len(gradients))
        return [
            new if old is None else old.result() if new is None else old.add(new).result()
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

    def gathered(self, bucket: int) -> list[torch.Tensor] | None:
        """The full parameters of a bucket if an earlier micro-batch of the step gathered them."""
        return self._gathered.get(bucket)

    def keep_gathered(self, bucket: int, whole: list[torch.Tensor]) -> None:
        """Keep the full parameters of a bucket until the last micro-batch of the step."""
        if self.keeps:
            self._gathered[bucket] = whole
        else:
            self._gathered.pop(bucket, None)

    def note_parameters(self, program: Hashable, parameters: Sequence[torch.Tensor]) -> None:
        """Note whether parameters have changed since they were gathered.

        Where they were replaced, or written as a whole, as by loading a state dict, all ranks see
        it, and gather them again.

        Args:
            program: key of the program that reads them.
            parameters: DTensors.
        """
        if not (self.keeps or self._gathered):
            return
        if not self._gathered:  # a new step
            self._known.clear()
        now = [_Version.of(parameter) for parameter in parameters]
        known = self._known.setdefault(program, now)
        if any(one.is_other_than(before) for one, before in zip(now, known, strict=True)):
            self._gathered.clear()
            self._known = {program: now}
            known = now
        self.written = any(one.shard != old.shard for one, old in zip(now, known, strict=True))

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
        before = self.waits, self.keeps
        self.waits = self.keeps = True
        try:
            yield
        finally:
            self.waits, self.keeps = before

    @contextmanager
    def micro_batch(self, *, waits: bool, keeps: bool) -> Iterator[None]:
        """A context for forward of a micro-batch whose place in a schedule is known.

        Args:
            waits: True if backward of another micro-batch comes later.
            keeps: True if forward of another micro-batch comes later.
        """
        self.waits, self.keeps = waits, keeps
        try:
            with self.forward():
                yield
        finally:
            self.waits = self.keeps = False

    def clear(self) -> None:
        """Forget the gradients and gathered parameters of a step that failed."""
        self._unreduced.clear()
        self._gathered.clear()


_ACTIVE: ContextVar[GradientAccumulation | None] = ContextVar("active", default=None)


def active_accumulation() -> GradientAccumulation | None:
    """Accumulation of gradients of the model whose forward runs; None outside of a model."""
    return _ACTIVE.get()
