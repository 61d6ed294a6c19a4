"""Calls of planned models under `torch.autocast`."""

from contextlib import AbstractContextManager, nullcontext

import torch

from autoshard.errors import PlanError
from autoshard.graph import DType


def outside_autocast(device: str, dtype: DType | None) -> AbstractContextManager[object]:
    """A context in which a planned program runs without `torch.autocast`.

    The casts of a program are a part of it. Further ones would change the element types, and so
    the memory and the collectives of the plan.

    Args:
        device: type of the devices.
        dtype: element type in which operators read most parameters; None without parameters.

    Raises:
        PlanError: autocast is active with another element type than the plan's.
    """
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    wanted = torch.get_autocast_dtype(device)
    if dtype is None or wanted is not getattr(torch, dtype.value):
        name = str(wanted).removeprefix("torch.")
        raise PlanError(
            f"the planned model is called under torch.autocast({device!r}, {wanted}), and the plan "
            f"computes in {dtype or 'no floating-point type'}: export the model with "
            f"export_model(..., mixed_precision={name!r}) and plan that, or call it outside of "
            f"autocast (with accelerate and the Trainer of transformers: without bf16 or fp16)"
        )
    return torch.autocast(device, enabled=False)
