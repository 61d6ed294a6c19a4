"""Optimizers of `torch.optim` by the names that plans give them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from autoshard.costs.optimizer import Optimizer

_Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

_RATE = 1e-6
"""So small that made-up numbers stay what they are."""

_MAKERS: Mapping[Optimizer, _Make] = {
    Optimizer.SGD: partial(torch.optim.SGD, lr=_RATE),
    Optimizer.SGD_MOMENTUM: partial(torch.optim.SGD, lr=_RATE, momentum=0.9),
    Optimizer.ADAM: partial(torch.optim.Adam, lr=_RATE),
    Optimizer.ADAMW: partial(torch.optim.AdamW, lr=_RATE),
    Optimizer.ADAFACTOR: partial(torch.optim.Adafactor, lr=_RATE),
}


def local_optimizer(name: str, tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The optimizer of some tensors; None where there are none, or nothing updates them."""
    make = _MAKERS.get(Optimizer(name.lower()))
    return make(tensors) if make is not None and tensors else None
