"""The number of the step from which a planned model's random numbers follow."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoshard.errors import PlanError
from autoshard.runtime.parallelize import PlannedForward, planned_forward


def rng_step(model: nn.Module) -> "RngStep":
    """What a planned model counts its steps with, for a checkpoint of a training with dropout.

    Dropout draws its numbers from the seed that `parallelize` was given, the number of the step,
    and the slice that a rank has. A training that goes on where another one ended therefore needs
    the number too. It is no part of the model's state dict; save it beside that:

        state = {"model": ..., "optimizer": ..., "steps": rng_step(model)}
        dcp.save(dcp_state_dict(state), checkpoint_id="run")

    and load it likewise (`dcp.load` puts it into the model), or set `rng_step(model).value`.
    Under another plan the same numbers are drawn as far as it cuts what is dropped alike; the
    others are as good.

    Args:
        model: what `parallelize` returned.

    Raises:
        PlanError: the model does not run as planned.
    """
    return RngStep(planned_forward(model))


class RngStep:
    """Counts calls of a planned model; `torch.distributed.checkpoint` saves and loads it.

    Args:
        forward: what runs when the model is called.
    """

    def __init__(self, forward: PlannedForward) -> None:
        self._forward = forward

    @property
    def value(self) -> int:
        """The number of the next step: how often forward has run, evaluation included.

        May be set, to the same on all ranks.

        Raises:
            PlanError: it is set to something else than a whole number from 0 on.
        """
        return self._forward.step

    @value.setter
    def value(self, step: int) -> None:
        # Random numbers follow from it, and 1.0 is another seed than 1.
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise PlanError(f"the number of a step cannot be {step!r}; it is an int from 0 on")
        self._forward.step = step

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The number, as a tensor, so that no pickle is written."""
        return {"value": torch.tensor(self.value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the number of a checkpoint.

        Raises:
            PlanError: it has none.
        """
        found: Any = state.get("value")
        if isinstance(found, torch.Tensor) and not found.dim():
            found = found.item()
        self.value = found
