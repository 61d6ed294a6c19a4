"""Data loaders that read only this rank's rows of each batch."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from autoshard.base.arguments import Seed, check_arguments
from autoshard.errors import PlanError
from autoshard.layouts import to_placements
from autoshard.runtime.global_tensors.global_tensor import GlobalTensor
from autoshard.runtime.parallelize import planned_forward, takes_other_shapes
from autoshard.runtime.planned_forward import PlannedForward
from autoshard.runtime.signature import Arguments
from autoshard.torch_private import given_num_samples, pytree

T = TypeVar("T")


@check_arguments
def shard_loader(loader: DataLoader[T], model: nn.Module, *, seed: Seed = 0) -> DataLoader[T]:
    """Make a data loader that yields this rank's rows of each global batch.

    A rank reads and collates only its own rows; ranks among which the plan does not shard the batch
    read the same rows. Tensors of rows, labels too, are DTensors of the global batch that know
    whose rows they are; pass them to forward and to losses as they are. If inputs are sharded
    differently along dim 0 (one sharded, another one replicated), every rank reads all rows, and
    forward shards them. So it is for a last smaller batch, unless the model refuses other shapes.

    All ranks shuffle in the same order: if the given loader has no generator, one is seeded with
    `seed`, and each epoch has another order. A custom sampler must yield the same indices on all
    ranks.

    Args:
        loader: yields global batches, of the size that the model was planned for.
        model: returned by `parallelize`.
        seed: seed of the shuffling; the same on all ranks.

    Returns:
        A loader with the same dataset, workers and collation.

    Raises:
        PlanError: the model was not returned by `parallelize`, the dataset cannot be indexed, or
            the loader yields single rows. While iterating: a batch has another size than planned.
    """
    forward = planned_forward(model)
    if isinstance(loader.dataset, IterableDataset):
        raise PlanError(
            "the loader's dataset cannot be indexed, so a rank cannot read only its rows; pass "
            "global batches to the model, and forward takes this rank's shard"
        )
    if loader.batch_sampler is None:
        raise PlanError("the loader yields single rows; set its batch_size or batch_sampler")
    shuffled = _shuffled_alike(loader.batch_sampler, loader.sampler, seed)
    batches = _RankRows(shuffled, forward.arguments, takes_others=takes_other_shapes(model))
    settings = {**_settings(loader), "collate_fn": _Collate(loader.collate_fn)}
    sharded = _ShardedLoader(_Numbered(loader.dataset), batch_sampler=batches, **settings)
    sharded.share = partial(_shared, forward)
    return sharded


_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _OPTIONS}


def _shuffled_alike(
    batches: Iterable[list[int]], sampler: Iterable[int], seed: int
) -> Iterable[list[int]]:
    """The batches in an order that is the same on all ranks."""
    if type(batches) is not BatchSampler or type(sampler) is not RandomSampler:
        return batches
    if sampler.generator is not None:
        return batches
    shuffled = RandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=given_num_samples(sampler),
        generator=torch.Generator().manual_seed(seed),
    )
    return BatchSampler(shuffled, batches.batch_size, batches.drop_last)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a batch.

    Attributes:
        index: of the dataset.
        of: number of rows of the global batch.
    """

    index: Any
    of: int


class _Numbered(Dataset[Any]):
    """A dataset whose rows state how many there are in their global batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, while it is unpickled in a worker
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, rows: Sequence[_Row]) -> list[tuple[Any, int]]:
        indices = [row.index for row in rows]
        at_once = getattr(self.dataset, "__getitems__", None)
        found = at_once(indices) if at_once else [self.dataset[index] for index in indices]
        return list(zip(found, (row.of for row in rows), strict=True))


class _Collate:
    """Collates rows as the given loader does, and keeps the size of the global batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: Sequence[tuple[Any, int]]) -> tuple[Any, int, int]:
        return self._collate([row for row, _ in rows]), len(rows), rows[0][1]


class _ShardedLoader(DataLoader[Any]):
    """A loader whose batches are this rank's rows.

    Attributes:
        share: makes the rows a part of the global batch; takes the batch, the number of rows of
            this rank, and that of all.
    """

    share: Callable[[Any, int, int], Any]

    def __iter__(self) -> Any:
        return (self.share(*found) for found in super().__iter__())


def _shared(forward: PlannedForward, batch: Any, own: int, of: int) -> Any:
    """A batch whose tensors of own rows are global tensors."""
    if own == of:
        return batch
    mesh, layout = forward.mesh, forward.arguments.row_layout
    placements = to_placements(layout, tuple(mesh.shape))

    def share(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == own:
            local = leaf.to(mesh.device_type, non_blocking=True)
            return GlobalTensor.shared(local, mesh, placements, (of, *leaf.shape[1:]))
        if isinstance(leaf, MutableMapping):  # such as the batches of tokenizers
            for name in list(leaf):
                leaf[name] = pytree.tree_map(share, leaf[name])
        return leaf

    return pytree.tree_map(share, batch)


class _RankRows(Sampler[list[_Row]]):
    """This rank's rows of every batch.

    Args:
        batches: row indices of each global batch.
        arguments: the arguments of the planned forward.
        takes_others: True if the model takes batches of other sizes than planned.
    """

    def __init__(
        self, batches: Iterable[list[int]], arguments: Arguments, *, takes_others: bool
    ) -> None:
        self._takes_others = takes_others
        self._batches = batches
        self._arguments = arguments

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # as DataLoader itself does

    def __iter__(self) -> Iterator[list[_Row]]:
        for batch in self._batches:
            rows = self._rows(len(batch))
            # A worker is given nothing but these indices, so each one states the batch's size.
            yield [_Row(index, len(batch)) for index in batch[rows]]

    def _rows(self, size: int) -> slice:
        rows = self._arguments.rows(size)
        if rows is None and not self._takes_others:
            planned = " or ".join(map(str, self._arguments.row_numbers))
            raise PlanError(
                f"a batch has {size} rows; the plan is for {planned}: set the loader's batch_size "
                f"to that, and drop_last=True"
            )
        return slice(0, size) if rows is None else rows
