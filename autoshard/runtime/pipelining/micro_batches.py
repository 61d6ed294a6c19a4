"""Arguments of a step divided into micro-batches, and their results joined."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Signature
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.plan.document import Pipeline, PipelineArgument
from autoshard.runtime.call_structure import CallStructure
from autoshard.runtime.dtensors import full_tensor
from autoshard.runtime.signature import check_literal
from autoshard.torch_private import pytree


class MicroBatches:
    """Divides the arguments of a step along the dims in which they are larger than planned.

    Args:
        pipeline: has the arguments of a micro-batch.
        signature: signature of the model's forward.

    Attributes:
        number: of micro-batches.
    """

    def __init__(self, pipeline: Pipeline, signature: Signature) -> None:
        self.number = pipeline.micro_batches
        self._arguments = pipeline.arguments
        targets = [argument.target for argument in self._arguments]
        self._structure = CallStructure(targets, pipeline.in_spec, signature)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The flat arguments with their names.

        Raises:
            PlanError: they are not those that were exported.
        """
        leaves = self._structure.flatten(args, kwargs)
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

    def split_target(self, target: Any) -> list[Any]:
        """Arguments of the loss function for each micro-batch.

        Tensors are divided along dim 0, other objects go to every micro-batch.

        Raises:
            PlanError: dim 0 of a tensor cannot be divided.
        """
        leaves, spec = pytree.tree_flatten(target)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and (not leaf.ndim or len(leaf) % self.number):
                raise PlanError(
                    f"the target has shape {tuple(leaf.shape)}, and dim 0 cannot be divided into "
                    f"{self.number} micro-batches"
                )
        return [
            pytree.tree_unflatten(
                [
                    _part(x, 0, number, self.number) if isinstance(x, torch.Tensor) else x
                    for x in leaves
                ],
                spec,
            )
            for number in range(self.number)
        ]

    def divided(self, leaves: Sequence[Any]) -> tuple[int, int] | None:
        """The dim that is divided, and its size in a micro-batch; None if there is no single one.

        Args:
            leaves: the flat arguments of the whole batch.
        """
        found = set()
        for argument, leaf in zip(self._arguments, leaves, strict=True):
            dim = None if argument.shape is None else self._dim(argument, leaf)
            if dim is not None and argument.shape is not None:
                found.add((dim, argument.shape[dim]))
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
