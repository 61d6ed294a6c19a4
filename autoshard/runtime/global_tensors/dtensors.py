"""DTensor support for the layouts of a plan that PyTorch does not handle.

`DTensor.full_tensor` and `torch.distributed.checkpoint` expect one slice per rank and axes nested
in mesh order.
"""

from collections.abc import Mapping, Sequence
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


PLANNED_MESHES: set[DeviceMesh] = set()
"""The meshes of planned models: DTensors on others are left to PyTorch."""


def dcp_state_dict(state: T, model: nn.Module | None = None) -> T:
    """Prepare a state dict for `torch.distributed.checkpoint`.

    Planned models need it only if they have pipeline stages: of tied parameters, several ranks may
    have copies, of which one is saved and all are loaded.

    For other modules, DTensors of which a rank has several slices (its part of each third of a
    fused QKV weight) are replaced by tensors that state the position of each slice and share memory
    with the originals, so `dcp.load` fills the given state dict. The checkpoint contains the global
    tensor, which any plan can load.

    Args:
        state: state dict of a model or an optimizer; not changed.
        model: a model with pipeline stages; None for others.
    """
    copies = model.tied_copies if isinstance(model, HasCopies) else frozenset[str]()

    def prepared(path: Sequence[Any], leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        is_copy = bool(copies) and any(_names_one_of(str(part), copies) for part in path)
        if is_copy or (leaf.device_mesh not in PLANNED_MESHES and sub_shards_of(leaf) is not None):
            return _CheckpointTensor(leaf, is_saved=not is_copy)
        return leaf

    mapped: T = pytree.tree_map_with_path(prepared, state)
    return mapped


def support_checkpoints(mesh: DeviceMesh) -> None:
    """Let `torch.distributed.checkpoint` save and load the DTensors on the mesh of a planned model.

    DTensor states one slice per rank, with a wrong offset if a rank has several slices, or if the
    axes of a dim nest in another order than the mesh's.
    """
    PLANNED_MESHES.add(mesh)
    patched: Any = DTensor
    patched.__create_write_items__ = _write_items
    patched.__create_chunk_list__ = _chunk_list
    patched.__get_tensor_shard__ = _tensor_shard


def sub_shards_of(tensor: DTensor) -> dict[torch.Size, torch.Tensor] | None:
    """This rank's slices by their offsets; None if it has one where DTensor says it is."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        return None
    sizes = tuple(tensor.device_mesh.shape)
    layout = from_placements(tensor.placements, sizes)
    slices = layout.local_slices(tensor.shape, sizes, coordinate)
    if all(len(parts) == 1 for parts in slices) and not layout.nesting:
        return None
    return _by_offset(tensor, slices)


def _by_offset(tensor: DTensor, slices: DimSlices) -> dict[torch.Size, torch.Tensor]:
    pieces = sub_shards(DTensor.to_local(tensor).detach(), slices)
    return {torch.Size(part.start for part in piece.index): piece.local for piece in pieces}


_TORCHS: Any = {
    name: getattr(DTensor, name)
    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
}
"""The methods of DTensor itself."""


def _planned_sub_shards(tensor: DTensor) -> dict[torch.Size, torch.Tensor] | None:
    return sub_shards_of(tensor) if tensor.device_mesh in PLANNED_MESHES else None


def _write_items(self: DTensor, fqn: str, given: object) -> list[WriteItem]:
    pieces = _planned_sub_shards(self)
    if pieces is None:
        items: list[WriteItem] = _TORCHS["__create_write_items__"](self, fqn, given)
        return items
    return write_items(fqn, self.size(), pieces)


def _chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
    pieces = _planned_sub_shards(self)
    if pieces is None:
        chunks: list[ChunkStorageMetadata] = _TORCHS["__create_chunk_list__"](self)
        return chunks
    return chunks_of(pieces)


def _tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
    pieces = _planned_sub_shards(self)
    if pieces is None:
        shard: torch.Tensor = _TORCHS["__get_tensor_shard__"](self, index)
        return shard
    assert index.offset is not None
    return pieces[index.offset]


def write_items(
    fqn: str, size: torch.Size, pieces: Mapping[torch.Size, torch.Tensor]
) -> list[WriteItem]:
    """The items that a rank writes of a tensor: each of its slices.

    Args:
        fqn: name of the tensor.
        size: global shape.
        pieces: this rank's slices by their offsets.
    """
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(pieces[chunk.offsets]),
                size=size,
            ),
        )
        for chunk in chunks_of(pieces)
    ]


def chunks_of(pieces: Mapping[torch.Size, torch.Tensor]) -> list[ChunkStorageMetadata]:
    """The positions of a rank's slices."""
    return [
        ChunkStorageMetadata(offsets=offsets, sizes=local.size())
        for offsets, local in pieces.items()
    ]


def _names_one_of(key: str, names: frozenset[str]) -> bool:
    """True if a key of a state dict is for one of some parameters, as in `['state.x.exp_avg']`."""
    text = f".{key.strip('[]').strip(chr(39))}."
    return any(f".{name}." in text for name in names)


class _CheckpointTensor(torch.Tensor):
    """This rank's sub-shards of a DTensor, for checkpoints only.

    Implements `torch.distributed._checkpointable._Checkpointable`.

    Args:
        tensor: the DTensor.
        is_saved: False if another rank saves the tensor.
    """

    _pieces: dict[torch.Size, torch.Tensor]
    _is_saved: bool

    def __new__(cls, tensor: DTensor, is_saved: bool) -> Self:  # noqa: FBT001  private
        """Make a wrapper that allocates no memory."""
        made = tensor_without_memory(cls, tensor)
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        made._pieces = {}  # noqa: SLF001  of this class
        if coordinate is not None:
            layout = from_placements(tensor.placements, tuple(mesh.shape))
            slices = layout.local_slices(tensor.shape, tuple(mesh.shape), coordinate)
            made._pieces = _by_offset(tensor, slices)  # noqa: SLF001
        made._is_saved = is_saved  # noqa: SLF001
        return made

    def __init__(self, *_: object, **__: object) -> None:
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
        return write_items(fqn, self.size(), self._pieces) if self._is_saved else []

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return chunks_of(self._pieces)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._pieces[index.offset]
