"""Ranking of layouts: which of two runs of one model on one cluster is faster."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.published.predictions import Prediction

_CLEAR = 0.05
"""Relative difference from which two published times are ranked."""
_FEWEST = 3
"""Number of layouts from which those of one model on one cluster are ranked."""
_ALIKE = ("model", "gpu_type", "gpus", "seq_len_tokens", "precision", "framework")
_LAYOUT = (
    *("dp_variant", "tp", "sp", "cp", "pp", "vpp", "ep", "act_ckpt"),
    "micro_batch_seqs_per_device",
)


@dataclass(frozen=True)
class Ranked:
    """Two runs that differ in layout, the faster one first.

    Attributes:
        faster: of the published runs, by seconds per sequence of the batch.
        slower: the other one, by more than 5 %.
        is_right: True if the prediction says so too.
    """

    faster: Prediction
    slower: Prediction
    is_right: bool


def ranked(predictions: Iterable[Prediction]) -> list[Ranked]:
    """All pairs of layouts of one model on one cluster with one software, of three or more."""
    groups: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for one in predictions:
        if one.ratio is not None and one.row.number("global_batch_seqs"):
            groups[one.row.source, *(one.row[column] for column in _ALIKE)].append(one)
    return [pair for group in groups.values() for pair in _pairs(group)]


def _pairs(group: Sequence[Prediction]) -> Iterator[Ranked]:
    if len({_layout(one) for one in group}) < _FEWEST:
        return
    for pair in combinations(group, 2):
        faster, slower = sorted(pair, key=lambda one: _per_sequence(one, one.row.seconds))
        seconds = [_per_sequence(one, one.row.seconds) for one in (faster, slower)]
        if _layout(faster) != _layout(slower) and seconds[1] > (1 + _CLEAR) * seconds[0]:
            is_right = _per_sequence(faster, faster.seconds) < _per_sequence(slower, slower.seconds)
            yield Ranked(faster, slower, is_right)


def _layout(one: Prediction) -> tuple[str, ...]:
    return tuple(one.row[column] for column in _LAYOUT)


def _per_sequence(one: Prediction, seconds: float | None) -> float:
    assert seconds is not None
    return seconds / (one.row.number("global_batch_seqs") or 1)


def ranking_table(predictions: Iterable[Prediction]) -> str:
    """How many pairs are ranked right, and the pairs as a table in Markdown."""
    pairs = ranked(predictions)
    if not pairs:
        return "Ranked right: no pairs."
    right = sum(pair.is_right for pair in pairs)
    lines = [
        f"Ranked right: {right} of {len(pairs)} pairs ({right / len(pairs):.0%}).",
        "",
        "| model | GPUs | faster | slower | published ratio | predicted ratio |",
        "|---|---|---|---|---:|---:|",
    ]
    return "\n".join([*lines, *map(_line, pairs)])


def _line(pair: Ranked) -> str:
    faster, slower = pair.faster, pair.slower
    published, predicted = (
        _per_sequence(slower, of_slower) / _per_sequence(faster, of_faster)
        for of_slower, of_faster in (
            (slower.row.seconds, faster.row.seconds),
            (slower.seconds, faster.seconds),
        )
    )
    row = faster.row
    return (
        f"| {row['model']} | {row['gpus']} {row['gpu_type']} | {row.id} | {slower.row.id} | "
        f"{published:.2f} | {predicted:.2f} |"
    )
