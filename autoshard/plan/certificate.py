"""The certificate of a plan in words."""

from collections.abc import Sequence
from math import floor, log10

from autoshard.base.outcome import SolveStatus
from autoshard.mesh import Mesh
from autoshard.plan.options import PlanOptions
from autoshard.plan.options.restrictions import restrictions
from autoshard.plan.predictions import Certificate

_MAX_NAMED = 4
"""Maximum number of restrictions that a sentence names."""
_DIGITS = 5
"""Significant digits of seconds."""


def certificate_statement(
    certificate: Certificate,
    options: PlanOptions,
    mesh: Mesh,
    proof: str | None = None,
    *,
    late: bool = False,
) -> str:
    """Statement of what a certificate proves, in one or two sentences; empty if there is no plan.

    Args:
        certificate: of a plan.
        options: of the request; restrictions among them limit the plans that it holds for.
        mesh: its hardware has the cost model.
        proof: the plans among which the bound of a pipeline holds; None for a plan of one stage.
        late: True if the time limit cut the search short.
    """
    if certificate.objective is None:
        return ""
    hardware = f"under the cost model of {mesh.topology.name}"
    obeyed = restrictions(options)
    if certificate.bound is None or certificate.gap is None:
        return f"No lower bound is proven: faster plans may exist {hardware}."
    if proof is not None:
        also = f" Its plans obey {listed(obeyed)}." if obeyed else ""
        return (
            f"{_distance(certificate)} a lower bound of {milliseconds(certificate.bound)} "
            f"{hardware}. It holds for these pipelines: {proof}.{also}"
        )
    budget = options.memory.budget or mesh.topology.device.memory
    number = options.training.micro_batches
    plans = (
        f"among the plans of one stage{f' and {number} micro-batches' if number > 1 else ''} in "
        f"offered layouts that fit {_gigabytes(budget)} per device"
    )
    if obeyed:
        plans += f" and obey {listed(obeyed)}"
    if certificate.is_exact:
        return f"Optimal {plans}: none is faster {hardware}."
    return (
        f"{_head(certificate, late=late)} {plans}: none takes less than "
        f"{milliseconds(certificate.bound)} {hardware}."
    )


def with_statement(
    certificate: Certificate,
    options: PlanOptions,
    mesh: Mesh,
    proof: str | None = None,
    *,
    late: bool = False,
) -> Certificate:
    """The certificate with its statement; arguments are those of `certificate_statement`."""
    statement = certificate_statement(certificate, options, mesh, proof, late=late)
    return certificate.model_copy(update={"statement": statement})


def percent(share: float) -> str:
    """A share in percent with two significant digits, rounded up: a gap is never understated.

    >>> percent(0.00031), percent(0.0425)
    ('0.031 %', '4.3 %')
    """
    if share <= 0:
        return "0 %"
    unit = 10.0 ** (floor(log10(100 * share)) - 1)
    digits = max(-floor(log10(unit)), 0)
    return f"{-floor(-100 * share / unit + 1e-9) * unit:.{digits}f} %"


def _head(certificate: Certificate, *, late: bool) -> str:
    assert certificate.gap is not None
    within = f"ithin {percent(certificate.gap)} of the optimum"
    if certificate.status is SolveStatus.OPTIMAL:
        return f"W{within}"
    stopped = "Stopped by the time limit" if late else "Not optimal yet"
    if certificate.status is SolveStatus.CANCELLED:
        stopped = "Stopped early"
    return f"{stopped}, but proven w{within}"


def _distance(certificate: Certificate) -> str:
    assert certificate.gap is not None
    if certificate.is_exact:
        return "Equal to"
    return f"Within {percent(certificate.gap)} of"


def listed(labels: Sequence[str]) -> str:
    """Labels of restrictions in a sentence; only the first few are named."""
    named = [*labels[:_MAX_NAMED]]
    if len(labels) > _MAX_NAMED:
        named.append(f"{len(labels) - _MAX_NAMED} more options")
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def milliseconds(seconds: float) -> str:
    """Seconds in milliseconds, rounded down: a bound is never overstated."""
    if seconds <= 0:
        return "0 ms"
    unit = 10.0 ** (floor(log10(1e3 * seconds)) + 1 - _DIGITS)
    digits = max(-floor(log10(unit) + 0.5), 0)
    return f"{floor(1e3 * seconds / unit + 1e-6) * unit:.{digits}f} ms"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.4g} GB"
