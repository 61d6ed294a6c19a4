"""Predicted times of published runs."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from math import inf
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.plan.document import Plan
from autoshard.planner import make_plan
from benchmarks.published.layouts import InexpressibleError, Request, request_of
from benchmarks.published.programs import program
from benchmarks.published.rows import Row


class _Store(dict[str, bytes]):
    """Solved blocks, which stages and rows share."""

    def put(self, key: str, body: bytes) -> None:
        """Keep bytes under a key."""
        self[key] = body


_BLOCKS = _Store()


@dataclass(frozen=True)
class Prediction:
    """A predicted time beside the published one, or the reason why there is none.

    Attributes:
        row: the published run.
        seconds: predicted seconds of a step; None if the row cannot be expressed.
        parts: predicted seconds of compute, communication and so on, as in `Costs`.
        assumed: what the row does not say.
        reason: why the row cannot be expressed; empty otherwise.
        peak: predicted bytes of a device at the peak; None if they are not known.
    """

    row: Row
    seconds: float | None
    parts: dict[str, float]
    assumed: tuple[str, ...] = ()
    reason: str = ""
    peak: int | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over published seconds."""
        published = self.row.seconds
        return None if self.seconds is None or published is None else self.seconds / published

    def to_json(self) -> dict[str, Any]:
        """An object of the list that `--json` writes."""
        row = self.row
        found: dict[str, Any] = {"id": row.id, "trust": row["trust"], "category": row["category"]}
        found |= {"predicted_s": self.seconds, "published_s": row.seconds}
        if self.peak is not None:
            found["peak_bytes"] = self.peak
        if self.assumed:
            found["assumed"] = list(self.assumed)
        if self.reason:
            found["reason"] = self.reason
        return found

    @classmethod
    def from_json(cls, row: Row, found: Mapping[str, Any]) -> "Prediction":
        """The prediction of a row, from an object of the list that `--json` writes."""
        assumed, reason = tuple(found.get("assumed", ())), found.get("reason", "")
        return cls(row, found["predicted_s"], {}, assumed, reason, found.get("peak_bytes"))


def predict(
    rows: Iterable[Row],
    processes: int,
    *,
    time_limit: float = inf,
    report: Callable[[str], None] = lambda _: None,
) -> list[Prediction]:
    """Predictions of all rows, in their order; rows that take the least time are planned first.

    Args:
        rows: published runs.
        processes: number of processes.
        time_limit: seconds after which no further row is planned.
        report: called with a line for each prediction.
    """
    listed = list(rows)
    groups = _groups(listed)
    by_id: dict[str, Prediction] = {}
    end = time.time() + time_limit
    with ProcessPoolExecutor(processes) as pool:
        for group in pool.map(predict_group, groups, repeat(end)):
            for one in group:
                by_id[one.row.id] = one
                report(_line(one))
    return [by_id[row.id] for row in listed]


def predict_group(rows: list[Row], end: float) -> list[Prediction]:
    """Predictions of rows that share programs and plans.

    Args:
        rows: published runs.
        end: time, as `time.time` counts, after which no further row is planned.
    """
    known: dict[Any, Plan] = {}
    late = "not planned within the time limit of the run"
    return [
        _predict(row, known) if time.time() < end else Prediction(row, None, {}, reason=late)
        for row in rows
    ]


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows by model, so that programs are exported and equal requests planned once."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        columns = ("model", "seq_len_tokens", "tp", "pp")
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return sorted(groups.values(), key=lambda group: _effort(group[0]))


def _effort(row: Row) -> tuple[int, int]:
    """How long planning takes, in relation to other rows: by axes, and by pipeline ranks."""
    axes = sum((row.number(name) or 1) > 1 for name in ("tp", "cp", "ep"))
    pipeline = row.number("pp") or 1
    return axes + 2 * (pipeline > 1), pipeline


def _predict(row: Row, known: dict[Any, Plan]) -> Prediction:
    try:
        request = request_of(row)
        plan = _planned(request, known)
    except InexpressibleError as error:
        return Prediction(row, None, {}, reason=str(error))
    except AutoshardError as error:
        return Prediction(row, None, {}, reason=f"not planned: {error}")
    if plan.costs is None:
        return Prediction(row, None, {}, reason=f"not planned: {plan.reason}")
    parts = plan.costs.model_dump()
    peak = None if plan.memory is None else plan.memory.peak
    return Prediction(row, plan.costs.total, parts, request.assumed, peak=peak)


def _planned(request: Request, known: dict[Any, Plan]) -> Plan:
    key = (
        *(request.dims, request.batch, request.reduce_dtype, request.mesh),
        request.options.model_dump_json(),
    )
    if key not in known:
        graph = program(request.dims, request.batch, request.reduce_dtype)
        known[key] = make_plan(graph, request.mesh, request.options, block_cache=_BLOCKS)
    return known[key]


def _line(one: Prediction) -> str:
    if one.ratio is None:
        return f"{one.row.id}: {one.reason}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in one.parts.items() if value)
    return f"{one.row.id}: {one.ratio:.3f} of published; seconds: {parts}"
