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


_NAMESPACES = {
    JobKind.PLAN: "plans",
    JobKind.VALIDATION: "validations",
    JobKind.SEARCH: "searches",
    JobKind.EXPLANATION: "explanations",
    JobKind.COVERAGE: "coverages",
}
