"""Names like one that is unknown, for messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question whether a similar name was meant, to end a message; empty if none is similar."""
    close = get_close_matches(name, list(dict.fromkeys(known)), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
