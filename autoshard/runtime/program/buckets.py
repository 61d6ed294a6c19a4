"""Buckets at run time: the reshardings of a bucket share collectives that overlap other work.

Autograd runs backward nodes in the reverse of the order in which forward created them, as soon as
their gradients are available. A bucket creates two nodes: one where it begins, and one where it
is first read. In forward, the all-gather is pending between the two. In backward, the later node
starts the reduction of the gradients, and the earlier one waits for it, after the backward of
everything that forward ran in between. Hooks, gradient accumulation and a second pass over the
same graph see complete gradients, as without buckets.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.costs import GATHERED_ONCE
from autoshard.errors import PlanError
from autoshard.layouts import AxisType, parse_type
from autoshard.lowering.buckets import Bucket
from autoshard.runtime.process_groups import process_group
from autoshard.runtime.program.accumulation import Reduce, active_accumulation, owner_of
from autoshard.runtime.resharding import ElementTypes, bind_steps, bind_with_casts
from autoshard.runtime.shards import from_rank_major, to_rank_major
from autoshard.torch_private import COLLECTIVES, assert_on_device

Tensors = Sequence[torch.Tensor]
Shapes = Sequence[torch.Size]
Start = Callable[[Tensors], torch.Tensor | None]
"""Starts a collective of tensors; returns None if there is nothing to communicate."""

Finish = Callable[[Shapes, torch.Tensor], list[torch.Tensor]]
"""Splits the result of a collective, given the shapes of the tensors that were sent."""


class PendingCollective:
    """A sequence of collectives, of which the first is running.

    Args:
        parts: the start and the finish of each collective.
        tensors: inputs of the first collective.
    """

    def __init__(self, parts: Sequence[tuple[Start, Finish]], tensors: Tensors) -> None:
        self._rest = list(parts)
        self._tensors = list(tensors)
        self._shapes: Shapes = ()
        self._moved: torch.Tensor | None = None
        self._finish: Finish | None = None
        self._advance()

    def _advance(self) -> None:
        while self._rest and self._moved is None:
            start, self._finish = self._rest.pop(0)
            self._moved = start(self._tensors)
        if self._moved is not None:
            self._shapes = [tensor.shape for tensor in self._tensors]
            self._tensors = []

    def wait(self) -> list[torch.Tensor]:
        """Wait for the first collective, run the others, and return the results."""
        while self._moved is not None:
            assert self._finish is not None
            self._tensors = self._finish(self._shapes, COLLECTIVES.wait_tensor(self._moved))
            self._moved = None
            self._advance()
        return self._tensors


class BucketSteps:
    """The collectives of a bucket.

    Args:
        bucket: a bucket of the stage.
        mesh: its mesh dim names are the axes of the bucket's steps.
        shapes: global shape of each tensor.
        micro_batches: number of micro-batches of a training step, as planned.
        dtypes: element types of the full tensors and of their reductions; None if they are
            those of the sources.

    Attributes:
        separate: for each resharding the functions that run it without the others.
        keeps_gathered: True if the full tensors stay in memory until the last micro-batch.
        num_waiting: number of the first steps whose backward waits for the last micro-batch.
        num_reducing: number of the other steps, whose backward runs in every micro-batch.
    """

    def __init__(
        self,
        bucket: Bucket,
        mesh: DeviceMesh,
        shapes: Sequence[Sequence[int]],
        micro_batches: int = 1,
        dtypes: ElementTypes | None = None,
    ) -> None:
        self._dtypes = dtypes
        pairs = zip(bucket.reshardings, shapes, strict=True)
        self.separate = tuple(
            bind_steps(resharding.steps, mesh, shape)
            if dtypes is None
            else (bind_with_casts(resharding.steps, mesh, shape, dtypes),)
            for resharding, shape in pairs
        )
        self._steps: list[_Reduce | _Gather] = []
        for steps in zip(*(resharding.steps for resharding in bucket.reshardings), strict=True):
            group = process_group(mesh, steps[0].axis)
            sources = [parse_type(step.source) for step in steps]
            is_sharded = sources[0].is_shard
            self._steps.append(_Gather(sources, group) if is_sharded else _Reduce(group))
        is_planned = micro_batches > 1
        self.keeps_gathered = is_planned and bucket.frequency in GATHERED_ONCE
        # Without a plan for micro-batches, all reductions wait, as those of DDP under no_sync.
        reductions = [runs for _, runs in bucket.runs(micro_batches)]
        self.num_waiting = reductions.count(1)
        self.num_reducing = len(self._steps) - self.num_waiting

    def forward(self, tensors: Tensors) -> PendingCollective:
        """Start to gather the full tensors, outside of autograd."""
        if self._gathers:
            tensors = self.as_read(tensors)
        return PendingCollective([(step.start, step.finish) for step in self._steps], tensors)

    def finish_forward(self, pending: PendingCollective) -> list[torch.Tensor]:
        """Wait for the full tensors."""
        whole = pending.wait()
        # Where nothing is gathered, it waits until the result is read.
        return whole if self._gathers else self.as_read(whole)

    @property
    def _gathers(self) -> bool:
        return any(isinstance(step, _Gather) for step in self._steps)

    def as_read(self, tensors: Tensors) -> list[torch.Tensor]:
        """Tensors in the element type of the full tensors."""
        if self._dtypes is None:
            return list(tensors)
        return [tensor.to(self._dtypes.read) for tensor in tensors]

    def as_reduced(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients in the element type of their reduction."""
        if self._dtypes is None:
            return list(gradients)
        dtype = self._dtypes.reduced
        return [None if gradient is None else gradient.to(dtype) for gradient in gradients]

    def backward(self, gradients: Tensors) -> PendingCollective:
        """Start to reduce the gradients, as far as that does not wait for other micro-batches."""
        return self._backward(self._steps[self.num_waiting :], gradients)

    def waiting_backward(self, gradients: Tensors) -> PendingCollective:
        """Start the rest of the reduction, of sums over micro-batches."""
        return self._backward(self._steps[: self.num_waiting], gradients)

    def reduction_of_one(self, number: int) -> tuple[Hashable, Reduce]:
        """A key, and the rest of the reduction for one tensor of the bucket alone."""
        waiting = self._steps[: self.num_waiting]

        def reduce(gradient: torch.Tensor) -> torch.Tensor:
            steps = [step.of_one(number) for step in waiting]
            (reduced,) = self._backward(steps, [gradient]).wait()
            return reduced

        return (id(self), number), reduce

    def own_shards(self, whole: Tensors) -> Tensors:
        """This rank's shards of the full tensors."""
        for step in reversed(self._steps):
            whole = step.own_shards(whole)
        return whole

    @staticmethod
    def _backward(steps: "Sequence[_Reduce | _Gather]", gradients: Tensors) -> PendingCollective:
        back = [(step.start_backward, step.finish_backward) for step in reversed(steps)]
        return PendingCollective(back, gradients)


class _Reduce:
    """I -> R: nothing in forward, an all-reduce in backward."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def of_one(self, _number: int) -> "_Reduce":
        return self

    def start(self, _: Tensors) -> None:
        return None

    def finish(self, _shapes: Shapes, _moved: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("forward starts no collective")

    def own_shards(self, whole: Tensors) -> Tensors:
        return whole

    def start_backward(self, gradients: Tensors) -> torch.Tensor:
        # Not in place for a single gradient: other nodes may read the tensor that autograd passes.
        if len(gradients) == 1:
            moved = COLLECTIVES.all_reduce(gradients[0].contiguous(), "sum", self._group.group_name)
        else:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            moved = COLLECTIVES.all_reduce_(flat, "sum", self._group.group_name)
        assert isinstance(moved, torch.Tensor)
        return moved

    def finish_backward(self, shapes: Shapes, moved: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(moved.reshape(-1), [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Gather:
    """S -> R: an all-gather in forward, a reduce-scatter in backward."""

    def __init__(self, sources: Sequence[AxisType], group: ProcessGroup) -> None:
        self._sources = sources
        self._group = group
        self._num_ranks = group.size()

    def of_one(self, number: int) -> "_Gather":
        return _Gather(self._sources[number : number + 1], self._group)

    def start(self, tensors: Tensors) -> torch.Tensor:
        flat = _joined([tensor.reshape(-1) for tensor in tensors])
        moved = COLLECTIVES.all_gather_into_tensor(flat, self._num_ranks, self._group.group_name)
        assert isinstance(moved, torch.Tensor)
        return moved

    def finish(self, shapes: Shapes, moved: torch.Tensor) -> list[torch.Tensor]:
        ranks = moved.view(self._num_ranks, -1)
        parts = torch.split(ranks, [shape.numel() for shape in shapes], dim=1)
        return [
            self._whole(part, shape, source)
            for part, shape, source in zip(parts, shapes, self._sources, strict=True)
        ]

    def _whole(self, part: torch.Tensor, shape: torch.Size, source: AxisType) -> torch.Tensor:
        # A collective puts the ranks along dim 0. Slices of another dim have to be moved next to
        # each other, which copies.
        slices = part.reshape(self._num_ranks, *shape)
        whole = slices.movedim(0, source.dim).flatten(source.dim, source.dim + 1).contiguous()
        return from_rank_major(whole, source, self._num_ranks) if source.sub_shards else whole

    def own_shards(self, whole: Tensors) -> Tensors:
        rank, own = self._group.rank(), []
        for tensor, source in zip(whole, self._sources, strict=True):
            (shape,) = self._local_shapes([tensor.shape], [source])
            own.append(self._rank_rows(tensor, source)[rank].view(shape))
        return own

    def start_backward(self, gradients: Tensors) -> torch.Tensor:
        rows = [
            self._rank_rows(gradient, source)
            for gradient, source in zip(gradients, self._sources, strict=True)
        ]
        flat = _joined(rows)
        name = self._group.group_name
        moved = COLLECTIVES.reduce_scatter_tensor(flat.flatten(), "sum", self._num_ranks, name)
        assert isinstance(moved, torch.Tensor)
        return moved

    def _rank_rows(self, gradient: torch.Tensor, source: AxisType) -> torch.Tensor:
        """A matrix whose row i has the slice of rank i."""
        if source.sub_shards:
            gradient = to_rank_major(gradient, source, self._num_ranks)
        slices = torch.unflatten(gradient, source.dim, (self._num_ranks, -1)).movedim(source.dim, 0)
        return slices.reshape(self._num_ranks, -1)

    def finish_backward(self, shapes: Shapes, moved: torch.Tensor) -> list[torch.Tensor]:
        local_shapes = self._local_shapes(shapes, self._sources)
        parts = torch.split(moved, [shape.numel() for shape in local_shapes])
        return [part.view(shape) for part, shape in zip(parts, local_shapes, strict=True)]

    def _local_shapes(self, shapes: Shapes, sources: Sequence[AxisType]) -> Shapes:
        """Shapes of the shards of full tensors."""
        local_shapes = []
        for shape, source in zip(shapes, sources, strict=True):
            sizes = list(shape)
            sizes[source.dim] //= self._num_ranks
            local_shapes.append(torch.Size(sizes))
        return local_shapes


def _joined(tensors: Tensors) -> torch.Tensor:
    """Concatenate tensors along the last dim; a single one is not copied."""
    return torch.cat(list(tensors), -1) if len(tensors) > 1 else tensors[0].contiguous()


class BucketOp:
    """A bucket in one run of a program, and in the backward passes through that run.

    Args:
        steps: the collectives of the bucket.
    """

    def __init__(self, steps: BucketSteps) -> None:
        self._steps = steps
        self._accumulation = active_accumulation()
        self._waits = self._accumulation is not None and self._accumulation.waits
        self._keeps_gathered = steps.keeps_gathered and torch.is_grad_enabled()
        self._gathered: list[torch.Tensor] | None = None
        self._forward: PendingCollective | None = None
        self._backward: PendingCollective | None = None
        self._token: torch.Tensor | None = None
        self._shapes: Shapes = ()
        self._reached: list[bool] = []
        self.sources: tuple[torch.Tensor, ...] = ()

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start the collectives of forward, as an autograd node."""
        self.sources = tuple(tensors)
        # The token is empty. It only links the two nodes, so that autograd runs the backward of
        # `_End` before that of `_Begin`; what is under way in between is no tensor that it could
        # pass.
        self._token = _Begin.apply(self, *tensors)  # type: ignore[no-untyped-call]  # torch

    def end(self) -> tuple[torch.Tensor, ...]:
        """Wait for the collectives of forward, and return the full tensors."""
        token, self._token = self._token, None
        whole: tuple[torch.Tensor, ...] = _End.apply(self, token)  # type: ignore[no-untyped-call]
        return whole

    def reshard(self, tensors: Tensors) -> list[torch.Tensor]:
        """Start the collectives of forward and wait for them, outside of autograd."""
        return self._steps.finish_forward(self._steps.forward(tensors))

    def start_forward(self, tensors: Tensors) -> None:
        """Start the collectives of forward, unless an earlier micro-batch has gathered."""
        if self._keeps_gathered and self._accumulation is not None:
            self._gathered = self._accumulation.gathered(id(self._steps))
        if self._gathered is None or self._accumulation is None:
            self._forward = self._steps.forward(tensors)
        else:
            own = self._steps.own_shards(self._gathered)
            try:
                written = self._accumulation.written
                _check_unchanged(self._steps.as_read(tensors), own, written=written)
            except PlanError:
                self._accumulation.forget_gathered()
                raise

    def wait_forward(self) -> list[torch.Tensor]:
        """Wait for the collectives of forward."""
        whole, self._gathered = self._gathered, None
        if whole is None:
            assert self._forward is not None
            pending, self._forward = self._forward, None
            whole = self._steps.finish_forward(pending)
        if self._keeps_gathered and self._accumulation is not None:
            self._accumulation.keep_gathered(id(self._steps), whole)
        self._shapes = [tensor.shape for tensor in whole]
        return whole

    def start_backward(self, gradients: Sequence[torch.Tensor | None], like: torch.Tensor) -> None:
        """Start the collectives of backward.

        Args:
            gradients: gradient of each full tensor; None if the differentiated outputs do not
                depend on it. Zeros are sent in its place, so that the bytes are as planned.
            like: a tensor of the dtype and device of the gradients.
        """
        if self._steps.num_reducing:
            self._start(self._steps.backward, gradients, self._shapes, like)
            return
        summed = self._summed(gradients)
        if summed is not None:
            self._start(self._steps.waiting_backward, summed, self._shapes, like)

    def wait_backward(self) -> list[torch.Tensor | None]:
        """Wait for the collectives of backward; None for each gradient that was None.

        All are None if the gradients wait for those of a later micro-batch.
        """
        steps = self._steps
        if not (steps.num_reducing and steps.num_waiting):
            return self._reduced() if self._backward else [None] * len(self._shapes)
        summed = self._summed(self._reduced())
        if summed is None:
            return [None] * len(self._shapes)
        shapes = [tensor.shape for tensor in self.sources]
        self._start(steps.waiting_backward, summed, shapes, self.sources[0])
        return self._reduced()

    def _summed(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None] | None:
        """Gradients with those of earlier micro-batches; None if they wait for a later one."""
        if self._accumulation is None:
            return gradients
        gradients = self._steps.as_reduced(gradients)
        owners = [owner_of(source) for source in self.sources]
        reduction = self._steps.reduction_of_one
        return self._accumulation.summed(owners, gradients, reduction, waits=self._waits)

    def _start(
        self,
        reduce: Callable[[Tensors], PendingCollective],
        gradients: Sequence[torch.Tensor | None],
        shapes: Shapes,
        like: torch.Tensor,
    ) -> None:
        self._reached = [gradient is not None for gradient in gradients]
        present = self._steps.as_reduced(gradients)
        dtype = next((g.dtype for g in present if g is not None), like.dtype)
        self._backward = reduce(
            [
                like.new_zeros(shape, dtype=dtype) if gradient is None else gradient
                for gradient, shape in zip(present, shapes, strict=True)
            ]
        )

    def _reduced(self) -> list[torch.Tensor | None]:
        """The result of the pending reduction."""
        assert self._backward is not None
        pending, self._backward = self._backward, None
        return [
            gradient if reached else None
            for gradient, reached in zip(pending.wait(), self._reached, strict=True)
        ]


def _check_unchanged(shards: Tensors, gathered: Tensors, *, written: bool) -> None:
    """Check that parameters are as they were when an earlier micro-batch gathered them.

    Args:
        shards: this rank's shards now.
        gathered: this rank's shards of what was gathered.
        written: True if operators in place have written shards since.

    Raises:
        PlanError: they have changed, by no optimizer of torch and no operator on the parameters
            themselves. On a GPU, a change of `data` ends the process instead, with the same words.
    """
    message = (
        "the shards of parameters have changed since the first micro-batch of this step gathered "
        "them: write into the parameters themselves, on all ranks, and not into to_local(), or "
        "after the last micro-batch of a step, which runs outside of no_sync()"
    )
    for shard, own in zip(shards, gathered, strict=True):
        # Compared as bytes, since NaN differs from itself.
        pair = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (shard, own)]
        if shard.is_cpu or written:
            if not torch.equal(*pair):
                raise PlanError(message)
        else:
            # Without waiting for the device.
            assert_on_device((pair[0] == pair[1]).all(), message)


class _Begin(torch.autograd.Function):
    """Starts the collectives of forward; its backward waits for those of backward."""

    @staticmethod
    def forward(ctx: Any, bucket: BucketOp, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.bucket = bucket
        bucket.start_forward(tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dtype = ctx.bucket.sources[0].dtype
        reduced = ctx.bucket.wait_backward()
        return None, *(None if gradient is None else gradient.to(dtype) for gradient in reduced)


class _End(torch.autograd.Function):
    """Waits for the collectives of forward; its backward starts those of backward."""

    @staticmethod
    def forward(ctx: Any, bucket: BucketOp, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.bucket = bucket
        ctx.like = token
        # A parameter that the loss does not depend on has no gradient, as in any module.
        ctx.set_materialize_grads(False)
        # If no collective ran, these are the parameters themselves, which are autograd leaves.
        return tuple(tensor.detach() for tensor in bucket.wait_forward())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.bucket.start_backward(gradients, ctx.like)
        return None, ctx.like.new_empty(0)
