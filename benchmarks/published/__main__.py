"""Predicted times of published training runs.

    python -m benchmarks.published [ROWS.csv] [--json OUT] [--predictions OUT]
                                   [--document docs/predictions.md] [--details FOLDER]
                                   [--accuracy]

Every row is built from its dimensions, planned in its published layout, and compared with the
published time of a step. With --predictions, nothing is planned: the predictions are those of a
file that --json wrote.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from autoshard.pricing.accuracy import TABLE
from benchmarks.document import replace_table
from benchmarks.published import report
from benchmarks.published.accuracy import accuracy_json, accuracy_rows, accuracy_table
from benchmarks.published.memory import memory_table
from benchmarks.published.predictions import Prediction, predict
from benchmarks.published.rows import ROWS, Row, RowError, read_rows

_TABLE = "autoshard/pricing/accuracy.json"
_PICTURE = Path("pictures") / "predictions.svg"
_ROWS, _SOURCES = "predictions.csv", "predictions_by_source.md"
_SOURCES_HEAD = """# Errors of predictions by source

By source and GPU; and on the rows of each source that fitted no constant."""


def main() -> int:
    """Predict all rows, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS, help="a CSV as runs.csv")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all predictions")
    parser.add_argument("--predictions", type=Path, help="a file of --json, read instead")
    parser.add_argument("--document", type=Path, help="a page whose tables are written")
    parser.add_argument("--details", type=Path, metavar="FOLDER", help="for rows and sources")
    parser.add_argument(
        "--accuracy", action="store_true", help=f"write the errors of predictions to {_TABLE}"
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument(
        "--time-limit", type=float, default=600.0, help="seconds after which no row is planned"
    )
    options = parser.parse_args()
    try:
        rows = read_rows(options.rows)
    except RowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    predictions = _predictions(rows, options)
    print(report.summary_table(predictions))
    if options.json is not None:
        text = json.dumps([one.to_json() for one in predictions], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.document is not None:
        _write(options.document, predictions)
    if options.details is not None:
        _write_details(options.details, predictions)
    if options.accuracy:
        TABLE.write_text(accuracy_json(accuracy_rows(predictions)), encoding="utf-8")
    return 0


def _predictions(rows: list[Row], options: argparse.Namespace) -> list[Prediction]:
    if options.predictions is None:
        show = partial(print, flush=True)
        return predict(rows, options.processes, time_limit=options.time_limit, report=show)
    found = {one["id"]: one for one in json.loads(options.predictions.read_text(encoding="utf-8"))}
    return [Prediction.from_json(row, found[row.id]) for row in rows if row.id in found]


def _tables(predictions: list[Prediction]) -> dict[str, str]:
    return {
        "errors": report.summary_table(predictions),
        "memory": memory_table(predictions),
        "reasons": report.reasons_table(predictions),
        "accuracy": accuracy_table(accuracy_rows(predictions)),
    }


def _write(document: Path, predictions: list[Prediction]) -> None:
    text = document.read_text(encoding="utf-8")
    for name, table in _tables(predictions).items():
        text = replace_table(text, name, table)
    document.write_text(text, encoding="utf-8")
    (document.parent / _PICTURE).write_text(report.plot(predictions), encoding="utf-8")


def _write_details(folder: Path, predictions: list[Prediction]) -> None:
    tables = (report.source_table(predictions), report.cross_validation_table(predictions))
    (folder / _SOURCES).write_text("\n\n".join([_SOURCES_HEAD, *tables]) + "\n", "utf-8")
    (folder / _ROWS).write_text(report.rows_csv(predictions), encoding="utf-8", newline="")


if __name__ == "__main__":
    sys.exit(main())
