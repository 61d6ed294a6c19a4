"""Kinds of jobs, and where the result of each is kept."""

from enum import StrEnum


class JobKind(StrEnum):
    """What a job makes."""

    PLAN = "plan"
    VALIDATION = "validation"
    SEARCH = "search"
    EXPLANATION = "explanation"
    COVERAGE = "coverage"

    @property
    def namespace(self) -> str:
        """Namespace of the results in the cache, by their id."""
        return _NAMESPACES[self]


def known_kind(name: str) -> JobKind | None:
    """The kind of a job; None for one that only a newer release knows, of the same database."""
    return JobKind(name) if name in _KNOWN else None


_KNOWN = frozenset(JobKind)

_NAMESPACES = {
    JobKind.PLAN: "plans",
    JobKind.VALIDATION: "validations",
    JobKind.SEARCH: "searches",
    JobKind.EXPLANATION: "explanations",
    JobKind.COVERAGE: "coverages",
}
