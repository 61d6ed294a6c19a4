"""Predicted memory of published training runs, which fitted into their devices."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.published.hardware import memory_of
from benchmarks.published.predictions import Prediction

_TRUST = "A"


def share_of_memory(one: Prediction) -> float | None:
    """Predicted peak over the memory of the device; None if one of them is not known."""
    memory = memory_of(one.row)
    return None if one.peak is None or memory is None else one.peak / memory


def memory_table(predictions: Iterable[Prediction]) -> str:
    """Table in Markdown of the runs of trust A that are predicted to exceed memory, by category."""
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    unknown = 0
    for one in predictions:
        if one.row["trust"] != _TRUST or one.ratio is None:
            continue
        share = share_of_memory(one)
        unknown += share is None
        if share is not None:
            groups[one.row["category"]].append((share, one.row.id))
    every = [x for group in groups.values() for x in group]
    first = (
        f"Predicted to exceed the memory of their GPU: {_exceeding(every)} of {len(every)} runs."
    )
    others = f" The peaks of {unknown} other runs were not recorded." if unknown else ""
    lines = [
        first + others,
        "",
        "| category | runs | exceed | median of memory | most | those that exceed |",
        "|---|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*lines, *(_line(name, group) for name, group in sorted(groups.items()))])


def _exceeding(group: Sequence[tuple[float, str]]) -> int:
    return sum(share > 1 for share, _ in group)


def _line(name: str, group: list[tuple[float, str]]) -> str:
    shares = sorted(group)
    median, most = shares[len(shares) // 2][0], shares[-1][0]
    above = ", ".join(f"{row} {share:.0%}" for share, row in shares if share > 1)
    return f"| {name} | {len(group)} | {_exceeding(group)} | {median:.0%} | {most:.0%} | {above} |"
