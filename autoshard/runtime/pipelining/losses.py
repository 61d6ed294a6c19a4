"""The losses of the micro-batches of a step, on the ranks of the last stage."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.errors import AutoshardError, PlanError
from autoshard.runtime.global_tensors.dtensors import full_tensor
from autoshard.torch_private import pytree

LossFunction = Callable[[Any, Any], torch.Tensor]
"""The loss of a micro-batch, from the result of forward and the target."""


class Losses:
    """The losses of a step.

    Args:
        loss_fn: the loss of a micro-batch; None if forward returns it.
        position: of the loss among the results of forward, if it returns it.
        scale: factor of each loss in that of the step.

    Attributes:
        found: the losses of the micro-batches, detached.
        used: positions of the results that a loss depends on.
        error: of the loss function, if it was put off.
    """

    def __init__(self, loss_fn: LossFunction | None, position: int, scale: float) -> None:
        self._loss_fn = loss_fn
        self._position = position
        self._scale = scale
        self._targets: Sequence[Any] = ()
        self._puts_off = False
        self.found: list[torch.Tensor] = []
        self.used: set[int] = set()
        self.error: AutoshardError | None = None

    def begin_step(self, targets: Sequence[Any], *, puts_off: bool) -> None:
        """Forget the step before.

        Args:
            targets: of each micro-batch.
            puts_off: True to keep an error of the loss function, and to run the schedule to its
                end, where the ranks that wait for gradients learn of it.
        """
        self._targets, self._puts_off = targets, puts_off
        self.found, self.used, self.error = [], set(), None

    def of(
        self, results: Sequence[Any], nest: Callable[[Sequence[Any]], Any], number: int
    ) -> torch.Tensor:
        """The loss of a micro-batch as it is differentiated.

        Args:
            results: of forward, flat.
            nest: makes of them what forward returns.
            number: of the micro-batch.

        Raises:
            PlanError: the loss function fails, or returns something else than a loss.
        """
        if self._loss_fn is None:
            loss: torch.Tensor = full_tensor(results[self._position])
        else:
            self._watch(results)
            try:
                loss = _called(self._loss_fn, nest(results), self._targets[number])
            except AutoshardError as error:
                if not self._puts_off:
                    raise
                self.error = self.error or error
                return _zero(results)
        self.found.append(loss.detach())
        return loss * self._scale

    def _watch(self, results: Sequence[Any]) -> None:
        """Note which results get a gradient."""
        for position, result in enumerate(results):
            if isinstance(result, torch.Tensor) and result.requires_grad:
                register: Any = result.register_hook  # torch does not type it
                register(lambda _, position=position: self.used.add(position))

    def end_step(self) -> None:
        """Forget the targets, and raise the error that was put off, if there is one."""
        self._targets = ()
        if self.error is not None:
            raise self.error

    def total(self, device: str) -> torch.Tensor:
        """The loss of the step as a float64 tensor without dims; 0 without losses."""
        if not self.found:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(self.found).sum().to(torch.float64) * self._scale


def _called(loss_fn: LossFunction, result: Any, target: Any) -> torch.Tensor:
    try:
        loss: Any = full_tensor(loss_fn(result, target))
    except AutoshardError:
        raise
    except Exception as error:
        raise PlanError(
            f"loss_fn failed for a micro-batch with the result {_shown(result)} and the target "
            f"{_shown(target)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise PlanError(
            f"loss_fn returned {_shown(loss)}; it must return the loss of a micro-batch, a tensor "
            f"with one element that is computed from the result with gradients enabled"
        )
    return loss.reshape(())


def _zero(results: Sequence[Any]) -> torch.Tensor:
    """A loss whose gradients are zero."""
    trained = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    return torch.stack([(x * 0).sum() for x in trained]).sum()


def _shown(value: Any) -> str:
    """Types and shapes of tensors in a nested value, for messages."""
    leaves, _ = pytree.tree_flatten(value)
    shown = [
        f"a tensor of shape {tuple(x.shape)} and type {x.dtype}"
        if isinstance(x, torch.Tensor)
        else f"{x!r:.40}"
        for x in leaves
    ]
    return ", ".join(shown)[:200] or f"{value!r:.40}"
