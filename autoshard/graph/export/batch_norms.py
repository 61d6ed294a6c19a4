"""Batch norms that average their statistics over all batches: `BatchNorm2d(..., momentum=None)`.

Their forward makes a number of the count of batches, which tracing cannot do. The same computation
with tensors alone can be traced.
"""

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autoshard.torch_private import BatchNormBase, check_input_dim


def average_with_tensors(model: nn.Module) -> None:
    """Make batch norms without a momentum average their statistics with operators of tensors.

    Args:
        model: a copy that is only traced.
    """
    for module in model.modules():
        if _counts(module):
            kind = type(module)
            members = {"forward": _forward, "__module__": kind.__module__}
            module.__class__ = type(kind.__name__, (kind,), members)


def _counts(module: nn.Module) -> bool:
    """True if a module makes a number of its count of batches, as its class defines it."""
    return (
        isinstance(module, BatchNormBase)
        and type(module).forward is BatchNormBase.forward
        and module.momentum is None
        and module.training
        and module.num_batches_tracked is not None
    )


@wraps(BatchNormBase.forward)  # so that it is recorded as what forward calls
def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert self.training, "the mode is recorded"
    assert self.momentum is None
    check_input_dim(self, x)
    self.num_batches_tracked.add_(1)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    with torch.no_grad():
        var, mean = torch.var_mean(x, dims)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            share = 1 / self.num_batches_tracked.to(running.dtype)
            running.copy_(running * (1 - share) + new.to(running.dtype) * share)
    return functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
