"""Search for the usage limit with which the peak of the optimal plan is within a memory budget."""

from math import isinf

SAME_LIMIT = 3e-3
"""Relative difference below which two usage limits count as equal."""


class LimitSearch:
    """Searches the largest usage limit for which the peak of the plan is within the budget.

    Attributes:
        limit: the next limit to try.
        fits: the largest limit so far whose plan fits.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.fits, self._exceeds = 0.0, float("inf")
        self.limit = float(budget)

    @property
    def is_over(self) -> bool:
        """True if no further limit is worth trying."""
        close = SAME_LIMIT * self._budget
        return self._exceeds - self.fits < close or self.limit - self.fits < 0.1 * close

    def record(self, usage: float, peak: int) -> None:
        """Record the usage in the problem and the true peak of the plan for the current limit."""
        excess = peak - self._budget
        if excess <= 0:
            self.fits = self.limit
            promising = usage - excess
        else:
            # Any limit between its usage and this limit would give the same plan.
            self._exceeds = min(self._exceeds, self.limit, usage)
            promising = usage - excess - 0.5 * SAME_LIMIT * self._budget
        between = self.fits < promising < self._exceeds
        self.limit = promising if between else self._middle

    def record_failure(self) -> None:
        """Record that no plan was found for the current limit."""
        self.fits = self.limit
        self.limit = self._middle

    @property
    def _middle(self) -> float:
        return self.fits if isinf(self._exceeds) else 0.5 * (self.fits + self._exceeds)
