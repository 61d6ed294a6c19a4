"""What the restrictions of a request cost, and where the time goes, in plain words."""

from collections import Counter
from collections.abc import Iterator

from autoshard.base.quantities import format_bytes
from autoshard.plan.certificate import listed
from autoshard.plan.comparisons import Unrestricted
from autoshard.plan.document import Plan
from autoshard.plan.predictions import Costs, step_time, three_digits
from autoshard.report.compare import collective_changes

_KINDS = {
    "compute": "compute",
    "communication": "communication",
    "recompute": "recomputation",
    "optimizer": "work of the optimizer",
    "overlapped": "of it overlapped with compute",
    "idle": "waiting for other pipeline ranks",
}
"""Kinds of costs in words."""

_CLEAR = 0.01
"""Share of a step from which the difference of a kind is named."""
_MAX_COLLECTIVES = 3
"""Maximum number of collectives that a sentence names."""


def restriction_sentences(plan: Plan) -> tuple[str, ...]:
    """The step time without the restrictions of the options, and where the difference comes from.

    For a plan in the layout of another framework (`read_like`), these say what the layout takes,
    what the fastest plan on the same mesh takes, and why.

    Args:
        plan: a plan that was made with the option `comparisons`.

    Returns:
        Sentences without a full stop; none if the options set no restrictions, or nothing was
        compared.
    """
    return tuple(_sentences(plan))


def _sentences(plan: Plan) -> Iterator[str]:
    free = plan.unrestricted
    if free is None or plan.costs is None:
        return
    without = f"Without {listed(free.restrictions)}"
    if free.costs is None or not free.costs.total:
        yield f"{without}: no plan was found in the time for comparisons"
        return
    ratio = plan.costs.total / free.costs.total
    shown = step_time(free.costs.total, free.performance)
    performances = (plan.performance, free.performance)
    error = max((one.error or 0.0 for one in performances if one is not None), default=0.0)
    within = ", a difference within the error of predictions" if abs(ratio - 1) < error else ""
    yield f"{without}: {shown}; this plan takes {ratio:.2f} x as long{within}"
    reasons = [*_times(plan, plan.costs, free, free.costs), *_memory(plan, free)]
    if reasons:
        yield f"Why: it has {', '.join(reasons)}"


def _times(plan: Plan, costs: Costs, free: Unrestricted, other: Costs) -> Iterator[str]:
    """The kinds of costs that differ clearly, the largest difference first."""
    found = {kind: getattr(costs, kind) - getattr(other, kind) for kind in _KINDS}
    for kind, seconds in sorted(found.items(), key=lambda pair: -abs(pair[1])):
        if abs(seconds) < _CLEAR * costs.total:
            continue
        more = "more" if seconds > 0 else "less"
        detail = ""
        if kind == "communication":
            detail = f" ({_collectives(plan, free)})"
        elif kind == "idle" and plan.pipeline is not None and free.bubble is not None:
            detail = f" (bubble {plan.pipeline.bubble:.0%} instead of {free.bubble:.0%})"
        yield f"{three_digits(abs(seconds))} {more} {_KINDS[kind]}{detail}"


def _collectives(plan: Plan, free: Unrestricted) -> str:
    """The collectives whose bytes differ most, forward and backward together."""
    before, after = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for change in collective_changes(plan.collectives, free.collectives):
        before[change.kind, change.axis] += change.bytes_before
        after[change.kind, change.axis] += change.bytes_after
    names = sorted({*before, *after}, key=lambda name: -abs(before[name] - after[name]))
    return ", ".join(
        f"{kind.replace('_', '-')} over {axis}: {format_bytes(before[kind, axis])} instead of "
        f"{format_bytes(after[kind, axis])}"
        for kind, axis in names[:_MAX_COLLECTIVES]
        if before[kind, axis] != after[kind, axis]
    )


def _memory(plan: Plan, free: Unrestricted) -> Iterator[str]:
    if plan.memory is not None and free.memory is not None:
        own, other = plan.memory.peak, free.memory.peak
        if abs(own - other) >= _CLEAR * own:
            yield f"a peak of {format_bytes(own)} instead of {format_bytes(other)} per device"
