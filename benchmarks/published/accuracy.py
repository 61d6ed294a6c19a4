"""The table of errors that predicted times carry, from predictions of published runs."""

from collections import defaultdict
from collections.abc import Iterable

from autoshard.mesh import generation_of, get_topology
from autoshard.pricing.accuracy import QUANTILE, ROWS, Accuracy, LayoutCategory
from benchmarks.published.hardware import preset_of
from benchmarks.published.predictions import Prediction
from benchmarks.published.report import percentile
from benchmarks.published.rows import Row

_TRUST = "A"
"""Trust of the runs that count: step time, layout and recomputation are published."""
_FEWEST = 5
"""Fewest runs of a row of the table."""
_DIGITS = 3


def category_of(row: Row) -> LayoutCategory:
    """The category of the layout of a row."""
    if row["category"] == "inference decode TP":
        return LayoutCategory.DECODING
    if "MoE" in row["category"]:
        return LayoutCategory.EXPERTS
    is_shared = any((row.number(name) or 1) > 1 for name in ("tp", "cp", "pp"))
    return LayoutCategory.MODEL_PARALLEL if is_shared else LayoutCategory.DATA_PARALLEL


def accuracy_rows(predictions: Iterable[Prediction]) -> tuple[Accuracy, ...]:
    """The errors by category and generation of GPUs, relative to the predicted times."""
    errors: dict[tuple[LayoutCategory, str], list[float]] = defaultdict(list)
    for one in predictions:
        preset = preset_of(one.row)
        generation = None if preset is None else generation_of(get_topology(preset))
        if one.ratio is not None and one.row["trust"] == _TRUST and generation is not None:
            errors[category_of(one.row), generation].append(abs(1 / one.ratio - 1))
    return tuple(
        Accuracy(
            category=category,
            generation=generation,
            num_runs=len(found),
            error=round(percentile(sorted(found), QUANTILE), _DIGITS),
        )
        for (category, generation), found in sorted(errors.items())
        if len(found) >= _FEWEST
    )


def accuracy_json(rows: tuple[Accuracy, ...]) -> str:
    """The text of the table `autoshard/pricing/accuracy.json`."""
    return ROWS.dump_json(rows, indent=1).decode() + "\n"


def accuracy_table(rows: Iterable[Accuracy]) -> str:
    """The table in Markdown."""
    lines = ["| layout | GPUs | published runs | error bar |", "|---|---|---:|---:|"]
    lines += [
        f"| {row.category} | {row.generation} | {row.num_runs} | +- {row.error:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)
