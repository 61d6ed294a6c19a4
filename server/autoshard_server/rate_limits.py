"""RateLimit headers: a caller's quotas and what is left of them (draft-ietf-httpapi-ratelimit)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quota:
    """A quota of a caller.

    Attributes:
        name: in the headers.
        unit: of the quota, as the draft names it.
        limit: the largest amount.
        used: the present amount.
    """

    name: str
    unit: str
    limit: int
    used: int


def rate_limit_headers(quotas: Sequence[Quota]) -> dict[str, str]:
    """`RateLimit-Policy` and `RateLimit`; empty without quotas."""
    if not quotas:
        return {}
    policies = (f'"{quota.name}";q={quota.limit};qu="{quota.unit}"' for quota in quotas)
    left = (f'"{quota.name}";r={max(0, quota.limit - quota.used)}' for quota in quotas)
    return {"RateLimit-Policy": ", ".join(policies), "RateLimit": ", ".join(left)}
