"""Data loaders that read only a rank's own rows of each batch."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from autoshard.errors import PlanError
from autoshard.runtime.parallelize import planned_forward
from autoshard.runtime.signature import Arguments

T = TypeVar("T")


def shard_loader(loader: DataLoader[T], model: nn.Module, *, seed: int = 0) -> DataLoader[T]:
    """A data loader of this rank's rows of the batches of another one.

    A rank reads and collates only its own rows; ranks among which the plan does not shard the
    batch read the same ones. Forward takes them as they are, and shards further dims, such as
    the sequence, itself. Where inputs are sharded differently (one along the batch and another
    one replicated), every rank reads all rows, and forward shards them.

    All ranks shuffle in the same order: where the given loader has no generator, one is made from
    `seed`, and each epoch has another order. A custom sampler must give the same indices on all
    ranks.

    Args:
        loader: of global batches, of the size that the model was planned for.
        model: returned by `parallelize`.
        seed: of the order of rows.

    Returns:
        A loader with the same dataset, workers and collation.

    Raises:
        PlanError: the model does not run as planned, the dataset cannot be indexed, or the
            loader gives single rows. While iterating: a batch is of another size.
    """
    forward = planned_forward(model)
    if isinstance(loader.dataset, IterableDataset):
        raise PlanError(
            "the loader's dataset cannot be indexed, so no rows can be chosen; pass global batches "
            "to the model, of which forward takes this rank's shard"
        )
    if loader.batch_sampler is None:
        raise PlanError("the loader gives single rows; give it a batch_size or a batch_sampler")
    batches = _Rows(_shuffled_alike(loader.batch_sampler, loader.sampler, seed), forward.arguments)
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
    """The same batches, in the same order on all ranks."""
    if type(batches) is not BatchSampler or type(sampler) is not RandomSampler:
        return batches
    if sampler.generator is not None:
        return batches
    shuffled = RandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,  # noqa: SLF001  None where it follows the dataset
        generator=torch.Generator().manual_seed(seed),
    )
    return BatchSampler(shuffled, batches.batch_size, batches.drop_last)


class _Rows(Sampler[list[int]]):
    """This rank's rows of every batch.

    Args:
        batches: indices of global batches.
        arguments: of the planned model.
    """

    def __init__(self, batches: Iterable[list[int]], arguments: Arguments) -> None:
        self._batches = batches
        self._arguments = arguments

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # as DataLoader itself asks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield batch[self._arguments.rows(len(batch))]
