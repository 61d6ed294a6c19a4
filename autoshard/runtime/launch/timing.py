"""Seconds of steps beside what the plan predicts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch

from autoshard.errors import PlanError
from autoshard.plan import Plan

_MILLISECONDS = 1e3


class StepTimer:
    """Measures steps.

    Args:
        plan: what predicts them.
        device: what a step runs on; work that it still does belongs to the step.
        report: told of each step, in a sentence; nobody is told if None.

    Raises:
        PlanError: the document holds no plan.

    Attributes:
        predicted: seconds that the plan predicts, with nothing hidden beside compute.
        seconds: of each step so far.
    """

    def __init__(
        self, plan: Plan, device: torch.device, report: Callable[[str], None] | None = None
    ) -> None:
        if plan.costs is None:
            raise PlanError(f"the document has no plan to compare with: {plan.reason}")
        self.predicted = plan.costs.total + plan.costs.overlapped
        self.seconds: list[float] = []
        self._device = device
        self._report = report

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what runs inside as one step."""
        self._wait()
        start = perf_counter()
        yield
        self._wait()
        self.seconds.append(perf_counter() - start)
        if self._report is not None:
            self._report(f"step {len(self.seconds)}: {self._beside(self.seconds[-1])}")

    def summary(self) -> str:
        """The median step in a sentence; the first step, which warms up, is left out."""
        counted = self.seconds[1:] or self.seconds
        if not counted:
            return "no steps were measured"
        return f"median of {len(counted)} steps: {self._beside(median(counted))}"

    def _beside(self, seconds: float) -> str:
        return (
            f"{seconds * _MILLISECONDS:.3f} ms, predicted {self.predicted * _MILLISECONDS:.3f} ms "
            f"({seconds / self.predicted:.2f} times as long)"
        )

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
