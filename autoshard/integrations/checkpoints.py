"""Checkpoints of planned models in the folders of training libraries.

Every rank writes and reads its own shards; all ranks must call these functions.
"""

import shutil
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autoshard.runtime import dcp_state_dict, rng_step, save_checkpoint

_STAGING = "weights.unfinished"


def replace_weights(
    model: nn.Module, folder: str | PathLike[str], *, max_file_bytes: int = 5_000_000_000
) -> None:
    """Save full weights as safetensors files, in place of those that an earlier save wrote.

    The earlier ones are removed when the new ones are complete.

    Args:
        model: returned by `parallelize`.
        folder: shared by all ranks.
        max_file_bytes: maximum size of the tensors in a file.

    Raises:
        CheckpointError: a rank cannot write.
    """
    folder = Path(folder)
    staging = folder / _STAGING
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(staging, ignore_errors=True)
    dist.barrier()
    save_checkpoint(model, staging, max_file_bytes=max_file_bytes)
    dist.barrier()  # the index is complete
    if is_first:
        for earlier in folder.glob("model*.safetensors*"):
            earlier.unlink()
        for file in staging.iterdir():
            file.rename(folder / file.name)
        staging.rmdir()
    dist.barrier()


def save_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], folder: str | PathLike[str]
) -> None:
    """Save the state of a model's optimizers, and the step of its random numbers.

    The checkpoint is one of `torch.distributed.checkpoint`; any other plan can load it. It replaces
    an earlier one.
    """
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    save(dcp_state_dict(_state(model, optimizers)), checkpoint_id=folder)


def load_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], folder: str | PathLike[str]
) -> None:
    """Load what `save_optimizers` saved."""
    state = _state(model, optimizers)
    loaded = dcp_state_dict(state)
    load(loaded, checkpoint_id=folder)
    for number, optimizer in enumerate(optimizers):
        own = state[f"optimizer_{number}"]
        # Tensors share memory, numbers such as the learning rate do not.
        own["param_groups"] = loaded[f"optimizer_{number}"]["param_groups"]
        set_optimizer_state_dict(model, optimizer, optim_state_dict=own)


def _state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    states = {
        f"optimizer_{number}": get_optimizer_state_dict(model, optimizer)
        for number, optimizer in enumerate(optimizers)
    }
    return {**states, "rng_step": rng_step(model)}
