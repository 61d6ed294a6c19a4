"""When to try again, and when to give up."""

import random
import time
from dataclasses import dataclass

from autoshard.errors import ServiceUnavailableError


@dataclass(frozen=True, slots=True)
class Retry:
    """How patient a client is with a service that does not answer, or says to come back.

    All requests can be repeated safely: plans are named by what was asked, and a repeated
    request carries the same `Idempotency-Key`.

    Attributes:
        attempts: times that a request is sent in all, before the service counts as out of reach.
        outage: seconds of silence to sit out while a plan is waited for, so that the service can
            be restarted meanwhile.
        first: seconds before the second attempt; each further pause is twice as long, and up to
            half of each is left to chance.
        longest: seconds that a pause takes at most, unless the service asks for more.
    """

    attempts: int = 4
    outage: float = 60.0
    first: float = 0.25
    longest: float = 8.0


class Trouble:
    """Failures in a row, and what to do about them.

    Args:
        retry: how patient to be.
        waiting: whether a plan is waited for.
    """

    def __init__(self, retry: Retry, *, waiting: bool) -> None:
        self._retry = retry
        self._waiting = waiting
        self._failures = 0
        self._since = 0.0

    def over(self) -> None:
        """The service answers again."""
        self._failures = 0

    def pause(self, error: ServiceUnavailableError) -> float:
        """Seconds to wait after a failure.

        Raises:
            ServiceUnavailableError: the failure, where it is time to give up.
        """
        now = time.monotonic()
        self._failures += 1
        if self._failures == 1:
            self._since = now
        retry = self._retry
        longest = retry.outage if self._waiting else retry.longest
        patience = longest - (now - self._since) if self._waiting else longest
        asked = error.retry_after or 0.0
        if asked > patience or patience <= 0:
            raise error
        if not self._waiting and self._failures >= retry.attempts:
            raise error
        backoff = min(retry.first * 2.0 ** min(self._failures - 1, 30), retry.longest)
        return max(asked, backoff * random.uniform(0.5, 1.0))  # noqa: S311  no secret
