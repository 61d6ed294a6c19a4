"""Data loaders that read only this rank's rows of each batch."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from autoshard.errors import PlanError
from autoshard.runtime.parallelize import planned_forward, takes_other_shapes
from autoshard.runtime.signature import Arguments
from autoshard.torch_private import given_num_samples

T = TypeVar("T")


def shard_loader(loader: DataLoader[T], model: nn.Module, *, seed: int = 0) -> DataLoader[T]:
    """Make a data loader that yields this rank's rows of each global batch.

    A rank reads and collates only its own rows; ranks among which the plan does not shard the
    batch read the same rows. Pass the batches to forward as they are; it shards other dims, such
    as the sequence. If inputs are sharded differently along dim 0 (one sharded, another one
    replicated), every rank reads all rows, and forward shards them. So it is for a last smaller
    batch, unless the model refuses other shapes.

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
    batches = _Rows(shuffled, forward.arguments, takes_others=takes_other_shapes(model))
    return DataLoader(loader.dataset, batch_sampler=batches, **_settings(loader))


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


class _Rows(Sampler[list[int]]):
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

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield batch[self._rows(len(batch))]

    def _rows(self, size: int) -> slice:
        rows = self._arguments.rows(size)
        planned, own = self._arguments.row_numbers
        # As many rows as a rank has of a planned batch would be taken for these.
        if rows is None and (not self._takes_others or size in own):
            raise PlanError(
                f"a batch has {size} rows; the plan is for {' or '.join(map(str, planned))}: set "
                f"the loader's batch_size to that, and drop_last=True"
            )
        return slice(0, size) if rows is None else rows
