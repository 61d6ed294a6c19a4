"""State of a step between its micro-batches: gradients and gathered parameters."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, Self, TypeAlias
from weakref import ReferenceType, WeakSet, ref

import torch
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoshard.torch_private import (
    DeferredShard,
    accumulates,
    dtensor_of,
    has_gradient_hooks,
    spec_of,
    stored_shard,
    version_counter,
)

Gradients: TypeAlias = list[torch.Tensor | None]
Reduce: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Sum:
    """A sum of gradients.

    Attributes:
        tensor: the sum.
        dtype: element type of the gradients.
        reduce: makes a shard of the parameter's gradient of it; all ranks call it.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    reduce: Reduce

    @classmethod
    def of(cls, gradient: torch.Tensor, dtype: torch.dtype | None, reduce: Reduce) -> Self:
        # Other nodes may read the tensor that autograd passes, so the first one is copied.
        return cls(gradient.to(dtype or gradient.dtype, copy=True), gradient.dtype, reduce)

    def with_last(self, gradient: torch.Tensor | None) -> torch.Tensor:
        if gradient is not None:
            self.tensor.add_(gradient)
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
    def of(cls, parameter: DTensor) -> Self:
        shard = stored_shard(parameter)
        counts = version_counter(parameter), version_counter(shard)
        return cls((ref(parameter), ref(shard)), *counts)

    def is_other_than(self, before: "_Version") -> bool:
        """True if it was replaced or written as a whole."""
        pairs = zip(self.tensor, before.tensor, strict=True)
        return self.whole != before.whole or any(one() is not old() for one, old in pairs)


class PendingGradient(DeferredShard):
    """The `grad` of a parameter with sums of micro-batches that are not reduced over ranks yet.

    The last micro-batch of a step takes the sums, and reduces them with its own gradients in the
    planned collectives. Whatever reads the shard before, such as an optimizer, a norm or
    `full_tensor()`, gets the reduced gradient, for which all ranks exchange the sums; from then on
    it is an ordinary DTensor. The sums are nowhere else, so that `zero_grad()` discards them.

    Attributes:
        base: what `grad` was before; None if there was nothing.
        sums: by what reduces them.
    """

    __slots__ = ()
    base: DTensor | None
    sums: dict[Hashable, _Sum]

    @classmethod
    def begin(cls, parameter: DTensor) -> "PendingGradient":
        """Put one without sums into the `grad` of a parameter."""
        shard = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        made = cls.deferred(shard, spec_of(parameter))
        base = parameter.grad
        assert base is None or isinstance(base, DTensor)
        made.base, made.sums = base, {}
        parameter.grad = made
        return made

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "PendingGradient | None":
        """That of a parameter, if it has one."""
        gradient = parameter.grad
        return gradient if isinstance(gradient, cls) else None

    def add_unreduced(
        self, key: Hashable, gradient: torch.Tensor, dtype: torch.dtype | None, reduce: Reduce
    ) -> None:
        """Add a gradient that is not reduced.

        Args:
            key: of the sum.
            gradient: of a micro-batch.
            dtype: element type of the sum; that of the gradient if None.
            reduce: reduces the sum.
        """
        if key in self.sums:
            self.sums[key].tensor.add_(gradient)
        else:
            self.sums[key] = _Sum.of(gradient, dtype, reduce)

    def add_reduced(self, shard: torch.Tensor) -> None:
        """Add this rank's shard of a gradient that is reduced."""
        if self.base is None:
            self.base = dtensor_of(shard, spec_of(self))
        else:
            stored_shard(self.base).add_(shard)

    @torch.no_grad()
    def compute_shard(self) -> torch.Tensor:
        """Reduce the sums, in an order that all ranks have in common."""
        for one in self.sums.values():
            reduced = one.reduce(one.tensor.to(one.dtype))
            self.add_reduced(reduced.to(self.dtype).contiguous())
        base, self.base = self.base, None
        self.sums.clear()
        assert base is not None
        return stored_shard(base)


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter whose gradient a backward pass computes.

    Attributes:
        parameter: the parameter.
        accumulator: the node of autograd that adds to its `grad`.
    """

    parameter: DTensor
    accumulator: Node

    @property
    def receives(self) -> bool:
        """True if the running backward pass adds to `grad`, instead of returning the gradient."""
        return accumulates(self.accumulator)

    @property
    def can_wait(self) -> bool:
        """True if nothing but the sum of the micro-batches' gradients is seen.

        Hooks of the parameter see each of them.
        """
        before = self.parameter.grad
        is_alike = isinstance(before, DTensor) and before.placements == self.parameter.placements
        return (before is None or is_alike) and not has_gradient_hooks(self.parameter)


class HasParameters(Protocol):
    """The node of autograd that shards of parameters come from.

    Attributes:
        parameters: in the order of its outputs.
        next_functions: the accumulators of their gradients.
    """

    parameters: Sequence[DTensor]
    next_functions: Sequence[tuple[Node, int]]


def owner_of(shard: torch.Tensor) -> Owner | None:
    """The parameter of a shard; None if it requires no gradient."""
    node: Any = shard.grad_fn
    if node is None:
        return None
    made: HasParameters = node
    place = shard.output_nr
    return Owner(made.parameters[place], made.next_functions[place][0])


class GradientAccumulation:
    """Gradients and gathered parameters that one planned model keeps between micro-batches.

    Args:
        dtype: element type of the sums; that of the gradients if None.

    Attributes:
        waits: True within `no_sync`: backward adds to gradients that can wait.
        keeps: True within `no_sync`: gathered parameters are kept for later micro-batches.
        written: True if shards of parameters were written, and not the parameters, since they were
            gathered; those on `data` do not count.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.waits = False
        self.keeps = False
        self._pending: dict[int, DTensor] = {}  # parameters that had pending gradients
        self._gathered: dict[int, list[torch.Tensor]] = {}  # by bucket
        self._known: dict[Hashable, list[_Version]] = {}  # by program
        self.written = False

    def summed(
        self,
        owners: Sequence[Owner | None],
        gradients: Sequence[torch.Tensor | None],
        reduce: Callable[[int], tuple[Hashable, Reduce]],
        *,
        waits: bool,
    ) -> Gradients | None:
        """Gradients with those of earlier micro-batches; None if they wait for a later one.

        Args:
            owners: the parameters; None for each that has no gradient.
            gradients: of this micro-batch; None for each tensor that it has none for.
            reduce: for a position, a key of the sum and what reduces it.
            waits: True if the micro-batch is not the last one.
        """
        if not (waits or self._pending):
            return list(gradients)
        found = list(gradients)
        accumulated = {n: x for n, x in enumerate(owners) if x is not None and x.receives}
        if not waits:
            for n, owner in accumulated.items():
                if owner.can_wait:
                    found[n] = self._take(owner.parameter, found[n], reduce(n)[0])
        # A bucket is reduced by one collective, so its gradients wait together or not at all.
        elif accumulated and all(owner is None or owner.can_wait for owner in owners):
            for n, owner in accumulated.items():
                gradient = found[n]
                if gradient is not None:
                    self._keep(owner.parameter, gradient, *reduce(n))
            return None
        return found

    def _keep(
        self, parameter: DTensor, gradient: torch.Tensor, key: Hashable, reduce: Reduce
    ) -> None:
        pending = PendingGradient.of(parameter)
        if pending is None:
            pending = PendingGradient.begin(parameter)
        pending.add_unreduced(key, gradient, self.dtype, reduce)
        self._pending[id(parameter)] = parameter

    def _take(
        self, parameter: DTensor, gradient: torch.Tensor | None, key: Hashable
    ) -> torch.Tensor | None:
        pending = PendingGradient.of(parameter)
        if pending is None:
            self._pending.pop(id(parameter), None)
            return gradient
        one = pending.sums.pop(key, None)
        if not pending.sums:
            parameter.grad = pending.base
            self._pending.pop(id(parameter), None)
        return gradient if one is None else one.with_last(gradient)

    def gathered(self, bucket: int) -> list[torch.Tensor] | None:
        """The full parameters of a bucket if an earlier micro-batch of the step gathered them."""
        return self._gathered.get(bucket)

    def keep_gathered(self, bucket: int, whole: list[torch.Tensor]) -> None:
        """Keep the full parameters of a bucket until the last micro-batch of the step."""
        if self.keeps:
            _watch_optimizers(self)
            self._gathered[bucket] = whole
        else:
            self._gathered.pop(bucket, None)

    def forget_gathered(self) -> None:
        """Let the next call gather parameters again, which have changed."""
        self._gathered.clear()

    def note_parameters(self, program: Hashable, parameters: Sequence[DTensor]) -> None:
        """Forget gathered parameters that have changed since.

        Where they were replaced, or written as a whole, as by loading a state dict, all ranks see
        it, and gather them again.

        Args:
            program: key of the program that reads them.
            parameters: that it reads.
        """
        if not (self.keeps or self._gathered):
            return
        now = [_Version.of(parameter) for parameter in parameters]
        known = self._known.get(program, now)
        if any(one.is_other_than(before) for one, before in zip(now, known, strict=True)):
            self.forget_gathered()
        if not self._gathered:  # a new step
            self._known.clear()
        known = self._known.setdefault(program, now)
        self.written = any(one.shard != old.shard for one, old in zip(now, known, strict=True))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context in which the buckets of a call of forward accumulate here."""
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
        for parameter in self._pending.values():
            pending = PendingGradient.of(parameter)
            if pending is not None:
                parameter.grad = pending.base
        self._pending.clear()
        self.forget_gathered()


_ACTIVE: ContextVar[GradientAccumulation | None] = ContextVar("active", default=None)
_WATCHING: WeakSet[GradientAccumulation] = WeakSet()


def active_accumulation() -> GradientAccumulation | None:
    """Accumulation of gradients of the model whose forward runs; None outside of a model."""
    return _ACTIVE.get()


def _watch_optimizers(accumulation: GradientAccumulation) -> None:
    """Forget gathered parameters when an optimizer steps: that does not change their versions."""
    _WATCHING.add(accumulation)
    _register_hook()


@cache
def _register_hook() -> None:
    register_optimizer_step_post_hook(_forget_all)


def _forget_all(*_: object) -> None:
    for accumulation in _WATCHING:
        accumulation.forget_gathered()
