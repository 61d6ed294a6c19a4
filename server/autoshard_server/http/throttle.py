"""Rate limit of invalid API keys, by the address that sends them."""

import ipaddress
from threading import Lock
from time import monotonic

import structlog
from cachetools import LRUCache

from autoshard_server.problems import ProblemType, limit_error

_MINUTE = 60.0
_MAX_ADDRESSES = 10_000
_IPV6_NETWORK = 64
"""Bits of an IPv6 address that identify a caller, who usually has all addresses below them."""

_log = structlog.get_logger(__name__)


class Throttle:
    """Counts invalid keys by address.

    An address has a number of tries, of which each invalid key takes one; they are given back
    within a minute.

    Args:
        tries: of an address.
    """

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._used: LRUCache[str, tuple[float, float]] = LRUCache(_MAX_ADDRESSES)
        self._lock = Lock()

    def check(self, address: str) -> None:
        """Refuse an invalid key, if its caller has sent too many of them.

        A valid key is never refused: behind a proxy, strangers may have the same address.

        Raises:
            ServerError: TOO_MANY_FAILURES.
        """
        with self._lock:
            used = self._current(_network(address))
        if used < self._tries:
            return
        wait = max(1, round((used - self._tries + 1) * _MINUTE / self._tries))
        raise limit_error(
            ProblemType.TOO_MANY_FAILURES,
            f"{address} has sent more than {self._tries} invalid keys within a minute",
            "max_invalid_keys",
            self._tries,
            headers={"Retry-After": str(wait)},
        )

    def failed(self, address: str) -> None:
        """Note an invalid key."""
        network = _network(address)
        with self._lock:
            used = self._current(network) + 1
            self._used[network] = (used, monotonic())
        if used - 1 < self._tries <= used:
            _log.warning("invalid_keys_throttled", address=address, tries=self._tries)

    def _current(self, network: str) -> float:
        used, since = self._used.get(network, (0.0, 0.0))
        return max(0.0, used - (monotonic() - since) * self._tries / _MINUTE)


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(ipaddress.ip_network((found, _IPV6_NETWORK), strict=False))
