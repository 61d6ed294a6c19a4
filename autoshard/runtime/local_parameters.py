"""A rank's slices of parameters, as a step reads them.

`DTensor.to_local` makes a new description of every gradient in every step. A parameter's gradient
is always placed as the parameter is, so here one description serves all steps.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.runtime.parameters import Holder


def local_getter(holder: Holder) -> Callable[[], torch.Tensor]:
    """What gives this rank's slice of a parameter in each step, connected to its gradient.

    Raises:
        PlanError: when it is called, if the parameter has become a plain tensor.
    """

    def get() -> torch.Tensor:
        parameter = holder.get()
        if not isinstance(parameter, DTensor):
            raise PlanError(
                f"parameter {holder.name!r} of {type(holder.module).__name__} was replaced by a "
                f"plain tensor after the plan was applied; load weights into the DTensor instead"
            )
        if torch.compiler.is_compiling():
            whole: torch.Tensor = parameter.to_local()
            return whole
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return parameter._local_tensor  # noqa: SLF001  what to_local gives, without a view
        local: torch.Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]  # torch
        return local

    return get


class _Local(torch.autograd.Function):
    """A parameter's slice; its gradient becomes a DTensor placed as the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.parameter_spec = parameter._spec  # noqa: SLF001  there is no other cheap way to it
        # A parameter that a loss does not reach has no gradient.
        ctx.set_materialize_grads(False)
        # The slice itself must not become a part of the graph.
        return parameter._local_tensor.detach()  # noqa: SLF001  likewise

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> DTensor | None:
        if gradient is None:
            return None
        # A DTensor says that its gradient is contiguous whatever the local one is, and fused
        # optimizers believe it.
        spec = copy(ctx.parameter_spec)
        return DTensor(gradient.contiguous(), spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch
