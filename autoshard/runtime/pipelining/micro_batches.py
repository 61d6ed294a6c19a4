"""Arguments of a step divided into micro-batches, and their results joined."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Signature
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.plan.document import Pipeline, PipelineArgument
from autoshard.runtime.checks.call_structure import CallStructure
from autoshard.runtime.global_tensors.dtensors import full_tensor
from autoshard.runtime.signature import check_literal
from autoshard.torch_private import pytree


class MicroBatchSplitter:
    """Divides the arguments of a step along the dims in which they are larger than planned.

    Args:
        pipeline: has the arguments of a micro-batch.
        signature: signature of the model's forward.
        target_dim: the dim along which tensors of targets are divided; None for that of the
            arguments.

    Attributes:
        number: of micro-batches.
    """

    def __init__(
        self, pipeline: Pipeline, signature: Signature, target_dim: int | None = None
    ) -> None:
        self.number = pipeline.micro_batches
        self._target_dim = target_dim
        self._arguments = pipeline.arguments
        targets = [argument.target for argument in self._arguments]
        self._structure = CallStructure(targets, pipeline.in_spec, signature)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat arguments.

        Raises:
            PlanError: they are not those that were exported.
        """
        return self._structure.flatten(args, kwargs)

    def named(self, leaves: Sequence[Any]) -> list[tuple[str, Any]]:
        """The flat arguments with their names."""
        return [(a.target, leaf) for a, leaf in zip(self._arguments, leaves, strict=True)]

    def split(self, leaves: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        """The tensors of each micro-batch, by their names in the programs of stages.

        Args:
            leaves: the flat arguments of the whole batch.

        Raises:
            PlanError: an argument does not fit the plan.
        """
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(self.number)]
        dims = []
        for argument, leaf in zip(self._arguments, leaves, strict=True):
            if argument.shape is None:
                check_literal(argument.target, argument.literal, leaf)
                continue
            dim = self._dim(argument, leaf)
            dims.append(dim)
            for number, part in enumerate(parts):
                part[argument.name] = leaf if dim is None else _part(leaf, dim, number, self.number)
        if self.number > 1 and dims and all(dim is None for dim in dims):
            raise PlanError(
                f"the arguments are one micro-batch, and a step has {self.number}: pass the whole "
                f"batch, {self.number} times as large"
            )
        return parts

    def _dim(self, argument: PipelineArgument, leaf: Any) -> int | None:
        """The dim that is divided; None for a tensor that all micro-batches read whole."""
        name, planned = argument.target, argument.shape
        assert planned is not None
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
            raise PlanError(
                f"argument {name!r} must be the tensor of the whole batch, the same on all ranks, "
                f"not {_shown(leaf)}"
            )
        if leaf.requires_grad:
            raise PlanError(
                f"argument {name!r} requires a gradient, which a pipeline does not return: pass a "
                f"detached tensor, or make it a parameter"
            )
        if leaf.dtype != getattr(torch, argument.dtype or ""):
            raise PlanError(
                f"argument {name!r} is {leaf.dtype}; the plan is for torch.{argument.dtype}"
            )
        shape = tuple(leaf.shape)
        if shape == planned:
            return None
        for dim, size in enumerate(planned):
            if shape == (*planned[:dim], self.number * size, *planned[dim + 1 :]):
                return dim
        raise PlanError(
            f"argument {name!r} has shape {shape}; the plan is for {self.number} micro-batches of "
            f"{planned}, so the whole batch is {self.number} times as large in one dim: leave the "
            f"last smaller batch out (drop_last=True), pad it, or make a plan for it"
        )

    def split_target(self, target: Any, leaves: Sequence[Any]) -> list[Any]:
        """Arguments of the loss function for each micro-batch.

        Tensors are divided, other objects go to every micro-batch.

        Args:
            target: of the whole batch.
            leaves: the flat arguments of the whole batch.

        Raises:
            PlanError: a tensor cannot be divided, or it is not known along which dim.
        """
        tensors, spec = pytree.tree_flatten(target)
        dims = [
            self._dim_of_target(x, leaves) if isinstance(x, torch.Tensor) else None for x in tensors
        ]
        return [
            pytree.tree_unflatten(
                [
                    x if dim is None else _part(x, dim, number, self.number)
                    for x, dim in zip(tensors, dims, strict=True)
                ],
                spec,
            )
            for number in range(self.number)
        ]

    def _dim_of_target(self, tensor: torch.Tensor, leaves: Sequence[Any]) -> int | None:
        """The dim along which a tensor of the target is divided; None for one micro-batch."""
        if self.number == 1:
            return None
        shape, dim = tuple(tensor.shape), self._target_dim
        if dim is None:
            dim = self._dim_of_batch(shape, leaves)
        elif dim < 0:
            dim += len(shape)
        if not 0 <= dim < len(shape) or shape[dim] % self.number:
            raise PlanError(
                f"the target has shape {shape}, and dim {dim} cannot be divided into "
                f"{self.number} micro-batches"
            )
        return dim

    def _dim_of_batch(self, shape: tuple[int, ...], leaves: Sequence[Any]) -> int:
        """The dim of a target in which it has the batch: that in which the arguments have it."""
        batches = {(dim, size * self.number) for dim, size in self._divided_dims(leaves)}
        dims, sizes = {dim for dim, _ in batches}, {size for _, size in batches}
        as_large = {dim for dim, size in enumerate(shape) if size in sizes}
        # Along dim 0, targets may be flattened: a row has several, one after the other.
        if dims == {0} and (0 in as_large or not as_large):
            return 0
        if len(dims) == 1 and as_large == dims:
            return dims.pop()
        places = ", ".join(f"dim {dim}, where the batch has {size}" for dim, size in batches)
        raise PlanError(
            f"the target has shape {shape}, and arguments are divided along {places}: it is not "
            f"known along which dim the target is; pass target_dim=... to autoshard.pipeline"
        )

    def _divided_dims(self, leaves: Sequence[Any]) -> set[tuple[int, int]]:
        """The dims along which arguments are divided, with their sizes in a micro-batch."""
        found = set()
        for argument, leaf in zip(self._arguments, leaves, strict=True):
            dim = None if argument.shape is None else self._dim(argument, leaf)
            if dim is not None and argument.shape is not None:
                found.add((dim, argument.shape[dim]))
        return found

    def divided(self, leaves: Sequence[Any]) -> tuple[int, int] | None:
        """The dim that is divided, and its size in a micro-batch; None if there is no single one.

        Args:
            leaves: the flat arguments of the whole batch.
        """
        found = self._divided_dims(leaves)
        return found.pop() if len(found) == 1 else None


def _part(tensor: torch.Tensor, dim: int, number: int, parts: int) -> torch.Tensor:
    size = tensor.shape[dim] // parts
    return tensor.narrow(dim, number * size, size)


def join_results(results: Sequence[Any], divided: tuple[int, int] | None) -> Any:
    """The result of the whole batch from those of micro-batches.

    Tensors that are as large as a micro-batch in the divided dim are concatenated, floating-point
    scalars are averaged, and other objects must be equal.

    Args:
        results: of each micro-batch, nested alike.
        divided: the dim along which arguments were divided, and its size in a micro-batch.

    Raises:
        PlanError: results cannot be joined.
    """
    if len(results) == 1:
        return results[0]
    flat = [pytree.tree_flatten(full_tensor(result)) for result in results]
    spec = flat[0][1]
    joined = [
        _joined(parts, divided) for parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(joined, spec)


def _joined(parts: Sequence[Any], divided: tuple[int, int] | None) -> Any:
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        if any(part != first for part in parts):
            raise PlanError(f"results of micro-batches differ: {parts[:4]}")
        return first
    if not first.ndim and first.is_floating_point():
        return torch.stack(list(parts)).mean()
    if divided is not None and first.ndim > divided[0] and first.shape[divided[0]] == divided[1]:
        return torch.cat(list(parts), divided[0])
    raise PlanError(
        f"a result of shape {tuple(first.shape)} cannot be joined over micro-batches: it is not as "
        f"large as a micro-batch in the dim that was divided; pass join=... to autoshard.pipeline"
    )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"{value!r:.80}"


Join = Callable[[Sequence[Any]], Any]
"""Joins the results of micro-batches."""
