"""Statement of what a search over meshes has proven."""

from collections.abc import Sequence
from math import ceil, inf, isfinite

from autoshard.base.outcome import SolveStatus, relative_gap
from autoshard.mesh import mesh_text
from autoshard.planner.meshes.candidates import MeshCandidate

_MAX_NAMES = 3
"""Maximum number of meshes that the statement names."""
_UNFINISHED = (SolveStatus.CANCELLED, SolveStatus.TIMED_OUT)


def search_bound(candidates: Sequence[MeshCandidate]) -> float:
    """Proven lower bound of the seconds of all plans of a search; -inf if a mesh has none."""
    return min((candidate.bound for candidate in candidates), default=-inf)


def search_statement(candidates: Sequence[MeshCandidate]) -> str:
    """The proof over all meshes of a search, and those that it did not finish.

    Args:
        candidates: the meshes, best first.
    """
    best = candidates[0].objective
    bounded = [c for c in candidates if c.bound > -inf]
    bound = search_bound(bounded)
    parts = []
    if isfinite(best) and isfinite(bound):
        among = "on this mesh" if len(candidates) == 1 else f"on these {len(candidates)} meshes"
        if len(bounded) < len(candidates):
            among = f"on {len(bounded)} of these {len(candidates)} meshes"
        # Rounded up, so that what is said is proven.
        gap = ceil(1e4 * relative_gap(best, min(best, bound))) / 1e4
        parts.append(
            f"no plan {among}, with the options and cost model of this search, takes more than "
            f"{gap:.2%} less time than the best one"
        )
    without = [c for c in candidates if c.bound == -inf]
    if without:
        parts.append(f"nothing is proven on {_names(without)}")
    unfinished = [c for c in candidates if _is_unfinished(c)]
    if unfinished:
        parts.append(f"stopped, or out of time, before it was finished: {_names(unfinished)}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _is_unfinished(candidate: MeshCandidate) -> bool:
    status = None if candidate.plan is None else candidate.plan.certificate.status
    return candidate.was_stopped or status in _UNFINISHED


def _names(candidates: Sequence[MeshCandidate]) -> str:
    """The first few meshes, and the number of the others."""
    names = ", ".join(mesh_text(candidate.mesh) for candidate in candidates[:_MAX_NAMES])
    more = len(candidates) - _MAX_NAMES
    return f"{names} and {more} more" if more > 0 else names
