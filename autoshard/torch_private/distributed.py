"""Private parts of `torch.distributed`, and of what reduces over ranks for an optimizer."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from autoshard.torch_private.versions import expected_of_torch

with expected_of_torch("functions of distributed state dicts and of clipping"):
    from torch.distributed import _state_dict_utils
    from torch.distributed._state_dict_utils import _distribute_tensors
    from torch.distributed.checkpoint import state_dict as _state_dict
    from torch.distributed.checkpoint.state_dict import (
        _get_model_state_dict,
        _get_optim_state_dict,
    )
    from torch.nn.utils.clip_grad import _get_total_norm

COLLECTIVES: Any = torch.ops._c10d_functional
"""The operators of functional collectives, such as `all_reduce` and `wait_tensor`.

Relies on: their names and arguments, by which `torch.compile` calls them too. The functions around
them, in `torch.distributed._functional_collectives`, are not public either.
"""

torch_total_norm: Callable[..., torch.Tensor] = inspect.unwrap(_get_total_norm)
"""The norm of several tensors, as torch computes it for `clip_grad_norm_`."""

torch_distribute_tensors: Callable[..., None] = _distribute_tensors
"""Fills DTensors of a state dict from full tensors that one rank has read, as torch does it."""


torch_model_state_dict: Callable[..., Any] = _get_model_state_dict
"""Makes the result of `get_model_state_dict` from a model and options, as torch does."""

torch_optimizer_state_dict: Callable[..., Any] = _get_optim_state_dict
"""Makes the result of `get_optimizer_state_dict` from a model, optimizers and options."""


def default_store() -> Any:
    """The key-value store by which the ranks of the default group have met.

    Relies on: `_get_default_store`. Launchers have a store of their own; there is no public way to
    get this one.
    """
    return distributed_c10d._get_default_store()


def replace_total_norm(
    function: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Let `clip_grad_norm_` and `get_total_norm` of torch compute norms by another function.

    Returns:
        The function that computed it before.

    Relies on: both are or call `_get_total_norm`, a wrapper that calls the function in its closure
    without gradients. There is no hook in it, and scripts have imported `get_total_norm` before.
    """
    wrapper: Any = _get_total_norm
    place = wrapper.__code__.co_freevars.index("func")
    cell = wrapper.__closure__[place]
    before: Callable[..., torch.Tensor] = cell.cell_contents
    cell.cell_contents = function
    return before


def mesh_of_other_ranks(device_type: str, ranks: torch.Tensor, names: Sequence[str]) -> DeviceMesh:
    """A mesh without process groups, which says where other ranks are.

    Relies on: `_init_backend`. The public constructor makes groups, for which it takes all ranks.
    """
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names), _init_backend=False)


def replace_distribute_tensors(function: Callable[..., None]) -> None:
    """Let `set_model_state_dict` and the like fill DTensors by another function.

    Relies on: they call `_distribute_tensors` of its module for full tensors, also for
    `broadcast_from_rank0`. There is no hook in them.
    """
    functions: Any = _state_dict_utils
    functions._distribute_tensors = function


def replace_state_dicts(of_model: Callable[..., Any], of_optimizers: Callable[..., Any]) -> None:
    """Let `get_model_state_dict` and `get_optimizer_state_dict` call other functions.

    Relies on: they call `_get_model_state_dict` and `_get_optim_state_dict` of their module with
    the model and the options, and so does `get_state_dict`. Hooks of state dicts do not know the
    options.
    """
    functions: Any = _state_dict
    functions._get_model_state_dict = of_model
    functions._get_optim_state_dict = of_optimizers
