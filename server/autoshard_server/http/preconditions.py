"""What a request says of the tag of its target (RFC 9110, section 13)."""

from dataclasses import dataclass

from fastapi import Request

_ANY = "*"


@dataclass(frozen=True, slots=True)
class Condition:
    """On which tag of its target a request changes something.

    Attributes:
        match: If-Match: only what has one of these tags; None without the header.
        differ: If-None-Match: only what has none of these.
    """

    match: frozenset[str] | None
    differ: frozenset[str] | None

    def holds(self, tag: str | None) -> bool:
        """Whether the request may go on where this is the tag, without quotes; None: no target."""
        found = set() if tag is None else {_ANY, f'"{tag}"'}
        fits = self.match is None or not found.isdisjoint(self.match)
        return fits and (self.differ is None or found.isdisjoint(self.differ))


def condition_of(request: Request) -> Condition:
    """The condition of a request that changes something; it always holds without headers."""
    return Condition(_tags(request, "if-match"), _tags(request, "if-none-match"))


def is_known(request: Request, tag: str) -> bool:
    """Whether If-None-Match says that the caller has it; a weak tag will do."""
    tags = _tags(request, "if-none-match") or frozenset()
    return not {_ANY, f'"{tag}"', f'W/"{tag}"'}.isdisjoint(tags)


def _tags(request: Request, header: str) -> frozenset[str] | None:
    given = request.headers.getlist(header)
    return frozenset(tag.strip() for tag in ",".join(given).split(",")) if given else None
