"""Tables and the plot of predictions beside published runs, for docs/predictions.md."""

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from math import log10
from statistics import median
from xml.sax.saxutils import escape

from benchmarks.published.fitted import FITTED
from benchmarks.published.predictions import Prediction

_COLOURS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2"),
    *("#7f7f7f", "#bcbd22", "#000000", "#aec7e8", "#ffbb78", "#98df8a", "#ff9896"),
)
_SIDE, _MARGIN, _LEGEND = 640, 56, 150
"""Pixels of the plot."""


def error(one: Prediction) -> float:
    """Relative error of a prediction."""
    assert one.ratio is not None
    return abs(one.ratio - 1)


def summary_table(predictions: Iterable[Prediction]) -> str:
    """Errors by category and trust, as a table in Markdown."""
    groups: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for one in predictions:
        groups[one.row["trust"], one.row["category"]].append(one)
    return _table("trust", "category", groups)


def source_table(predictions: Iterable[Prediction]) -> str:
    """Errors by source and GPU, as a table in Markdown."""
    groups: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for one in predictions:
        groups[one.row.source, one.row["gpu_type"]].append(one)
    return _table("source", "GPU", groups)


def _table(first: str, second: str, groups: Mapping[tuple[str, str], Sequence[Prediction]]) -> str:
    columns = (
        first,
        second,
        "rows",
        "predicted",
        "median ratio",
        "median error",
        "90th percentile",
    )
    lines = [f"| {' | '.join(columns)} |", "|---|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {name} | {other} | {len(group)} | {_errors(group)} |"
        for (name, other), group in sorted(groups.items())
        if any(one.ratio is not None for one in group)
    ]
    return "\n".join(lines)


def _errors(group: Sequence[Prediction]) -> str:
    ratios = sorted(one.ratio for one in group if one.ratio is not None)
    if not ratios:
        return "0 | | |"
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    most = percentile(errors, 0.9)
    return f"{len(ratios)} | {median(ratios):.2f} | {median(errors):.1%} | {most:.1%}"


def cross_validation_table(predictions: Iterable[Prediction]) -> str:
    """Errors by source on the rows that fitted no constant, as a table in Markdown."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for one in predictions:
        groups[one.row.source].append(one)
    names = ("source", "constants fitted to it", "rows that fitted", "other rows", "predicted")
    columns = (*names, "median ratio", "median error", "90th percentile")
    lines = [f"| {' | '.join(columns)} |", "|---|---|---:|---:|---:|---:|---:|---:|"]
    for source, group in sorted(groups.items()):
        ids = {one.row.id for one in group}
        constants = [name for name, rows in FITTED.items() if ids & set(rows)]
        fitted = {row for name in constants for row in FITTED[name]}
        others = [one for one in group if one.row.id not in fitted]
        start = f"{source} | {'; '.join(constants) or 'none'} | {len(ids & fitted)}"
        lines.append(f"| {start} | {len(others)} | {_errors(others)} |")
    return "\n".join(lines)


def percentile(numbers: Sequence[float], share: float) -> float:
    """The smallest of ascending numbers that at least a share of them does not exceed."""
    return numbers[min(int(share * len(numbers)), len(numbers) - 1)]


def reasons_table(predictions: Iterable[Prediction]) -> str:
    """Why rows cannot be expressed, as a table in Markdown."""
    counts = Counter(one.reason for one in predictions if one.reason)
    lines = ["| rows | reason |", "|---:|---|"]
    lines += [f"| {number} | {reason} |" for reason, number in counts.most_common()]
    return "\n".join(lines)


def rows_csv(predictions: Iterable[Prediction]) -> str:
    """Every predicted row, as CSV."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("row", "trust", "model", "GPUs", "layout", "published_s", "predicted_s", "ratio")
    )
    for one in predictions:
        if one.ratio is not None:
            row = one.row
            names = ("tp", "cp", "pp", "ep")
            layout = " ".join(f"{name}{row[name]}" for name in names if row[name] not in {"", "1"})
            gpus = f"{row['gpus']} {row['gpu_type']}"
            seconds = f"{row.seconds:.4g}", f"{one.seconds:.4g}", f"{one.ratio:.2f}"
            writer.writerow((row.id, row["trust"], row["model"], gpus, layout, *seconds))
    return text.getvalue()


def plot(predictions: Iterable[Prediction]) -> str:
    """Predicted over published seconds on logarithmic axes, as SVG; a colour for each source."""
    points = [one for one in predictions if one.ratio is not None]
    seconds = [s for one in points for s in (one.seconds, one.row.seconds) if s is not None]
    low, high = log10(min(seconds, default=1.0)) - 0.1, log10(max(seconds, default=10.0)) + 0.1
    inner = _SIDE - 2 * _MARGIN

    def x(value: float) -> float:
        return _MARGIN + inner * (log10(value) - low) / (high - low)

    def y(value: float) -> float:
        return _SIDE - x(value)

    width = _SIDE + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_SIDE}" font-size="12">',
        f'<rect width="{width}" height="{_SIDE}" fill="white"/>',
        *_grid(low, high, x, y),
        _diagonal(x(10**low), x(10**high)),
    ]
    sources = sorted({one.row.source for one in points})
    for number, source in enumerate(sources):
        colour = _COLOURS[number % len(_COLOURS)]
        top = _MARGIN + 18 * number
        parts.append(f'<circle cx="{_SIDE}" cy="{top}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_SIDE + 10}" y="{top + 4}">{escape(source)}</text>')
        parts += [
            f'<circle cx="{x(one.row.seconds):.1f}" cy="{y(one.seconds):.1f}" r="3" '
            f'fill="{colour}" fill-opacity="0.6"><title>{escape(one.row.id)}</title></circle>'
            for one in points
            if one.row.source == source and one.seconds and one.row.seconds
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


_Scale = Callable[[float], float]


def _grid(low: float, high: float, x: _Scale, y: _Scale) -> Iterator[str]:
    start, stop = 10**low, 10**high
    for power in range(int(low) - 1, int(high) + 1):
        value = 10.0**power
        if not start <= value <= stop:
            continue
        yield (
            f'<path d="M{x(value):.1f} {y(start):.1f}V{y(stop):.1f}M{x(start):.1f} '
            f'{y(value):.1f}H{x(stop):.1f}" stroke="#dddddd"/>'
        )
        yield f'<text x="{x(value) - 8:.1f}" y="{y(start) + 16:.1f}">{value:g}</text>'
        yield f'<text x="{x(start) - 40:.1f}" y="{y(value) + 4:.1f}">{value:g}</text>'
    yield f'<text x="{_SIDE / 2 - 60}" y="{_SIDE - 12}">published seconds of a step</text>'
    yield f'<text transform="translate(14 {_SIDE / 2 + 60}) rotate(-90)">predicted seconds</text>'


def _diagonal(start: float, stop: float) -> str:
    """The line on which predicted and published seconds are equal."""
    ends = f"M{start:.1f} {_SIDE - start:.1f}L{stop:.1f} {_SIDE - stop:.1f}"
    return f'<path d="{ends}" stroke="black"/>'
