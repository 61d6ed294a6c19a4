"""Exports to tables: JSON with all layouts, CSV with those of inputs and parameters."""

import csv
import json
from io import StringIO
from typing import Any

from autoshard.exports.outline import Outline, comment
from autoshard.exports.registry import export_target
from autoshard.plan.stage import PlacedInput

_COLUMNS = ("kind", "name", "aliases", "dtype", "shape", "local_shape", "layout", "placements")
_LEFT_OUT = (
    "the program itself, costs, memory and the certificate, which the plan's own document has"
)


@export_target(
    "json",
    media_type="application/json",
    written_as="JSON",
    content="everything that the plan places: tensors at rest, operators, reshardings, outputs",
)
def to_json(outline: Outline) -> str:
    """A JSON object: mesh, tensors at rest, outputs, operators, reshardings, checkpoints."""
    stage = outline.stage
    dumped: dict[str, Any] = stage.model_dump(
        mode="json", include={"nodes", "reshardings", "outputs", "checkpoints"}
    )
    document = {
        "comment": "Expresses 100 % of the plan's placements, as data: "
        f"autoshard's {outline.title}. Not expressed: {_LEFT_OUT}.",
        "mesh": dict(stage.axes),
        "mixed_precision": outline.plan.graph.model_dump(mode="json")["mixed_precision"],
        "tensors": {placed.target: _row(placed) for placed in stage.inputs},
        **dumped,
    }
    return json.dumps(document, indent=1) + "\n"


@export_target(
    "csv",
    media_type="text/csv",
    written_as="CSV after a comment",
    content="tensors at rest",
)
def to_csv(outline: Outline) -> str:
    """CSV with a header and a row for each parameter, buffer, constant and input."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for placed in outline.stage.inputs:
        row = {"name": placed.target, **_row(placed)}
        writer.writerow([_cell(row[column]) for column in _COLUMNS])
    axes = ", ".join(outline.axes)
    head = [
        "Expresses 100 % of the placements of tensors at rest, as data, and nothing else:",
        f"autoshard's {outline.title}, one placement per axis: {axes}.",
        f"Not expressed: operators, reshardings and outputs (json has them); {_LEFT_OUT}.",
    ]
    return comment(head) + text.getvalue()


def _row(placed: PlacedInput) -> dict[str, Any]:
    return placed.model_dump(mode="json", exclude={"name", "target"})


def _cell(value: str | list[Any]) -> str:
    """A list as text: sizes as `4x8`, names and placements separated by spaces."""
    if isinstance(value, str):
        return value
    return ("x" if value and isinstance(value[0], int) else " ").join(map(str, value))
