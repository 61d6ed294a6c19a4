"""Results of a planned model as one device would have them."""

from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.layouts import I, from_placements
from autoshard.runtime.resharding import bind_step

ResultT = TypeVar("ResultT")


def full_tensor(result: ResultT) -> ResultT:
    """A result with whole, plain tensors in place of DTensors; differentiable.

    All ranks of the mesh have to call it. Unlike `DTensor.full_tensor`, it is right for every
    layout that a plan may have, such as two axes that cut one dim in another order than the
    mesh's. A plan whose outputs are pinned whole (`Pins(outputs={"*": "I"})`) counts these
    collectives; here they come on top.

    Args:
        result: what forward returned, or any part of it.
    """
    mapped: ResultT = pytree.tree_map_only(DTensor, _whole, result)
    return mapped


def _whole(tensor: DTensor) -> torch.Tensor:
    mesh = tensor.device_mesh
    layout = from_placements(tensor.placements, tuple(mesh.shape))
    local: torch.Tensor = tensor.to_local()
    cut = [layout.cutting_axes(dim)[::-1] for dim in range(tensor.ndim)]  # innermost first
    partial = [axis for axis, t in enumerate(layout.types) if not (t.is_whole or t.is_shard)]
    for axis in (*partial, *(axis for axes in cut for axis in axes)):
        local = bind_step(layout.types[axis], I, mesh.get_group(axis), tensor.shape)(local)
    return local
