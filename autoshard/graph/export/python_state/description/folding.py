"""Records with equal layers written once: `layers.{0-63}.scale` stands for 64 paths.

Ranges are of parts of paths that are numbers. This file does not need torch.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from pydantic import JsonValue

Record = Mapping[str, JsonValue]
"""Values by the text of their paths."""

_RANGE = re.compile(r"\{(\d+)-(\d+)\}")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST = 1_000_000
"""Maximum number of paths of a record: it may come from a server."""


def fold(record: Record) -> dict[str, JsonValue]:
    """Write equal values of consecutive numbers once, at most for one number in a path."""
    groups: dict[tuple[str, str], dict[int, JsonValue]] = defaultdict(dict)
    folded: dict[str, JsonValue] = {}
    for path, value in record.items():
        number = None if "{" in path or ":" in path else _NUMBER.search(path)
        if number is None or number[0] != str(int(number[0])):
            folded[path] = value
        else:
            groups[path[: number.start()], path[number.end() :]][int(number[0])] = value
    for (before, after), values in groups.items():
        for first, last in _runs(values):
            part = f"{{{first}-{last}}}" if last > first else str(first)
            folded[f"{before}{part}{after}"] = values[first]
    return dict(sorted(folded.items()))


def _runs(values: Mapping[int, JsonValue]) -> Iterator[tuple[int, int]]:
    """First and last of consecutive numbers with equal values."""
    first: int | None = None
    last = 0
    for number in sorted(values):
        if first is not None and (number != last + 1 or values[number] != values[last]):
            yield first, last
            first = None
        first = number if first is None else first
        last = number
    if first is not None:
        yield first, last


def unfold(record: Record) -> dict[str, JsonValue]:
    """The record with all paths.

    Raises:
        ValueError: there are too many.
    """
    found: dict[str, JsonValue] = {}
    for path, value in record.items():
        run = _RANGE.search(path)
        first, last = (int(run[1]), int(run[2])) if run else (0, 0)
        if len(found) + last - first >= _MOST:
            raise ValueError(f"the record has more than {_MOST:,} paths")
        if run is None:
            found[path] = value
        else:
            before, after = path[: run.start()], path[run.end() :]
            found.update((f"{before}{i}{after}", value) for i in range(first, last + 1))
    return found
