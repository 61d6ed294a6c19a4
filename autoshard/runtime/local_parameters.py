"""A rank's slices of parameters, as a step reads them.

`DTensor.to_local` works the placement of every gradient out anew in every step. A parameter's
gradient is placed as the parameter is, so here the parameter's own description is taken over.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.runtime.parameters import Holder


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """This rank's slice of a parameter in each step; a copy of a model has its own.

    Attributes:
        holder: where the parameter is.
    """

    holder: Holder

    def get(self) -> torch.Tensor:
        """The slice as it is now, connected to the parameter's gradient.

        Raises:
            PlanError: the parameter has become a plain tensor.
        """
        parameter = self.holder.get()
        if not isinstance(parameter, DTensor):
            raise PlanError(
                f"parameter {self.holder.name!r} of {type(self.holder.module).__name__} was "
                f"replaced by a plain tensor after the plan was applied; load weights into the "
                f"DTensor instead"
            )
        if torch.compiler.is_compiling():
            whole: torch.Tensor = parameter.to_local()
            return whole
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return parameter._local_tensor  # noqa: SLF001  what to_local gives, without a view
        local: torch.Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]  # torch
        return local


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
