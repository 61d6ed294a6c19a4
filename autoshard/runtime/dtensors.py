"""DTensor support for the layouts of a plan that PyTorch does not handle.

`DTensor.full_tensor` and `torch.distributed.checkpoint` expect one slice per rank and axes nested
in mesh order.
"""

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.layouts import from_placements
from autoshard.runtime.global_tensors.origins import fresh
from autoshard.runtime.global_tensors.placed import Placed
from autoshard.runtime.shards import DimSlices, local_shard, sub_shards
from autoshard.torch_private import pytree, tensor_without_memory

T = TypeVar("T")


def from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """Wrap a rank's shard in a DTensor of a given global shape; differentiable."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; a plain tensor is returned unchanged."""
    return DTensor.to_local(tensor) if isinstance(tensor, DTensor) else tensor


def full_tensor(result: T) -> T:
    """Replace all DTensors by full, plain tensors; differentiable.

    All ranks of the mesh must call it. Unlike `DTensor.full_tensor`, it is correct for every
    layout of a plan, such as two axes that shard one dim in another order than the mesh's.
    Its collectives are not among those that the plan counts; to have them planned, replicate the
    outputs with `Pins(outputs={"*": "I"})`.

    Args:
        result: the result of forward, or any pytree with DTensors.
    """
    mapped: T = pytree.tree_map_only(DTensor, _full, result)
    return mapped


def _full(tensor: DTensor) -> torch.Tensor:
    fresh(tensor)
    return Placed.of(tensor).full()


@torch.no_grad()
def store_full(full: torch.Tensor, target: DTensor) -> None:
    """Copy this rank's shard of a full tensor into a DTensor."""
    mesh = target.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        sizes = tuple(mesh.shape)
        shard = local_shard(full, from_placements(target.placements, sizes), sizes, coordinate)
        local_tensor(target).copy_(shard)


@runtime_checkable
class HasCopies(Protocol):
    """A model of pipeline stages, in which several ranks may hold copies of a parameter.

    Attributes:
        tied_copies: names of the parameters on this rank that an earlier stage saves.
    """

    tied_copies: frozenset[str]


def dcp_state_dict(state: T, model: nn.Module | None = None) -> T:
    """Prepare a state dict for `torch.distributed.checkpoint`.

    `dcp.save` does not support DTensors of which a rank has several slices (its part of each
    third of a fused QKV weight). They are replaced by tensors that state the position of each
    slice and share memory with the originals, so `dcp.load` fills the given state dict. The
    checkpoint contains the global tensor, which any other plan can load.

    Args:
        state: state dict of a model or an optimizer; not changed.
        model: a model with pipeline stages, of whose tied parameters only the copies of the first
            stage are saved, and all are loaded; None for others.
    """
    copies = model.tied_copies if isinstance(model, HasCopies) else frozenset[str]()

    def prepared(path: Sequence[Any], leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        is_copy = bool(copies) and any(_names_one_of(str(part), copies) for part in path)
        return _with_sub_shards(leaf, is_saved=not is_copy)

    mapped: T = pytree.tree_map_with_path(prepared, state)
    return mapped


def _names_one_of(key: str, names: frozenset[str]) -> bool:
    """True if a key of a state dict is for one of some parameters, as in `['state.x.exp_avg']`."""
    text = f".{key.strip('[]').strip(chr(39))}."
    return any(f".{name}." in text for name in names)


def _with_sub_shards(tensor: DTensor, *, is_saved: bool) -> torch.Tensor:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tensor
    sizes = tuple(mesh.shape)
    layout = from_placements(tensor.placements, sizes)
    slices = layout.local_slices(tensor.shape, sizes, coordinate)
    # DTensor computes wrong offsets if the axes of a dim nest in another order than the mesh's.
    is_plain = all(len(parts) == 1 for parts in slices) and not layout.nesting
    return tensor if is_plain and is_saved else _CheckpointTensor(tensor, slices, is_saved)


class _CheckpointTensor(torch.Tensor):
    """This rank's sub-shards of a DTensor, for checkpoints only.

    Implements `torch.distributed._checkpointable._Checkpointable`.

    Args:
        tensor: the DTensor.
        slices: this rank's slices of each dim.
        is_saved: False if another rank saves the tensor.
    """

    _sub_shards: dict[torch.Size, torch.Tensor]
    _is_saved: bool

    def __new__(cls, tensor: DTensor, slices: DimSlices, is_saved: bool) -> Self:  # noqa: FBT001  private
        """Make a wrapper that allocates no memory."""
        made = tensor_without_memory(cls, tensor)
        made._sub_shards = {  # noqa: SLF001  of this class
            torch.Size(part.start for part in piece.index): piece.local
            for piece in sub_shards(tensor.to_local().detach(), slices)
        }
        made._is_saved = is_saved  # noqa: SLF001  of this class
        return made

    def __init__(self, *_: object) -> None:
        """Do nothing: `__new__` has made the tensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own signature lacks the operator
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{func}: this tensor is for torch.distributed.checkpoint only")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._sub_shards[chunk.offsets]),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
            if self._is_saved
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=local.size())
            for offsets, local in self._sub_shards.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._sub_shards[index.offset]
