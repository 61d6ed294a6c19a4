"""Weights of pipeline stages that `to_empty` has allocated, and nothing has initialised yet.

Code that initialises a whole model passes over parameters that are None on a rank, or stops at the
first one. What it leaves out must not be whatever was in memory.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.runtime.checks.agreement import raised_on_all_ranks
from autoshard.runtime.global_tensors.dtensors import local_tensor
from autoshard.runtime.parameters.model_tensors import empty_like
from autoshard.torch_private import own_buffers, own_parameters

_EMPTIED = "_emptied"


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers by uninitialised ones, which stay tied, as NaN.

    Args:
        model: has the tensors of this rank.
        device: of the new ones.
    """
    made: dict[int, torch.Tensor] = {}
    for module, name, tensor in list(_tensors(model)):
        if id(tensor) not in made:
            empty = empty_like(tensor.detach(), device)
            if empty.is_floating_point() or empty.is_complex():
                local_tensor(empty).fill_(torch.nan)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
        setattr(module, name, made[id(tensor)])
    vars(model)[_EMPTIED] = True


def check_initialised(model: nn.Module, mesh: DeviceMesh) -> None:
    """Check, in the first step after `allocate`, that everything has been initialised.

    Args:
        model: has the tensors of this rank.
        mesh: of all ranks, which call this alike.

    Raises:
        PlanError: a tensor has elements that are NaN, here or on another rank.
    """
    if not vars(model).get(_EMPTIED):
        return
    with raised_on_all_ranks(mesh, "the step did not run"):
        tensors = chain(model.named_parameters(), model.named_buffers())
        empty = [name for name, tensor in tensors if bool(local_tensor(tensor).isnan().any())]
        if empty:
            raise PlanError(
                f"{len(empty)} tensors have not been initialised since to_empty, such as "
                f"{empty[0]!r}. A rank has the parameters of its own stages, and the others are "
                f"None: initialise those that are not None under one seed on all ranks, initialise "
                f"the model before the plan is applied, or load_checkpoint into it"
            )
    del vars(model)[_EMPTIED]


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, tensor in chain(own_parameters(module).items(), own_buffers(module).items()):
            if tensor is not None:
                yield module, name, tensor
