"""State dicts for `torch.distributed.checkpoint`, which knows one block per rank and tensor."""

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.layouts import from_placements
from autoshard.runtime.blocks import blocks_of

StateT = TypeVar("StateT")


def dcp_state_dict(state: StateT) -> StateT:
    """A state dict as `torch.distributed.checkpoint` saves and loads it.

    A rank may hold several blocks of a tensor: its slice of each third of a fused weight. Such
    DTensors, which `dcp.save` refuses, are replaced by tensors that say where each block
    belongs. They look at the same memory, so what `dcp.load` reads into them is in the state
    dict that was given. The file holds the whole tensor, for any other plan to load.

    Args:
        state: of a model or an optimizer; not changed.
    """
    mapped: StateT = pytree.tree_map_only(DTensor, _with_blocks, state)
    return mapped


def _with_blocks(tensor: DTensor) -> torch.Tensor:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tensor
    sizes = tuple(mesh.shape)
    layout = from_placements(tensor.placements, sizes)
    dims = layout.local_slices(tensor.shape, sizes, coordinate)
    # DTensor also misplaces the one block of a dim that axes cut in another order than its own.
    is_plain = all(len(parts) == 1 for parts in dims) and not layout.nesting
    return tensor if is_plain else _Blocks(tensor, dims)


class _Blocks(torch.Tensor):
    """A distributed tensor as the blocks that this rank holds of it; for checkpoints alone.

    Implements `torch.distributed._checkpointable._Checkpointable`.

    Args:
        tensor: the tensor.
        dims: for each dim the parts of it that the rank holds.
    """

    _blocks: dict[torch.Size, torch.Tensor]

    def __new__(cls, tensor: DTensor, dims: Sequence[Sequence[slice]]) -> Self:
        """Make a tensor without memory of its own."""
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  there is no other way
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        made._blocks = {  # noqa: SLF001  ours
            torch.Size(part.start for part in block.parts): block.local
            for block in blocks_of(tensor.to_local().detach(), dims)
        }
        return made

    def __init__(self, *_: object) -> None:
        """All is there already: a tensor is made by `__new__`."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own signature lacks the operator
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{func}: this tensor is for torch.distributed.checkpoint alone")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._blocks[chunk.offsets]),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=block.size())
            for offsets, block in self._blocks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._blocks[index.offset]
