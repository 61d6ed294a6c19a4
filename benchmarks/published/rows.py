"""Rows of published runs, read from CSV."""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROWS = Path(__file__).parent / "runs.csv"
"""The rows that are shipped, with their sources."""

_COLUMNS = (
    *("id", "category", "model", "hf_config", "hidden", "layers", "heads", "kv_heads", "ffn"),
    *("vocab", "seq_len_tokens", "global_batch_seqs", "micro_batch_seqs_per_device", "gpus"),
    *("gpu_type", "gpus_per_node", "dp_variant", "tp", "sp", "cp", "pp", "vpp", "ep"),
    *("precision", "act_ckpt", "compile_kernels_attn", "framework", "step_time_s", "trust"),
    *("source", "notes", "optimizer"),
)


_NUMBER = re.compile(r"(\d+|\d{1,3}(?:,\d{3})+)(?:\.0+)?(?: ?\([^()]*\))?", re.ASCII)


class RowError(ValueError):
    """The file of rows is malformed; the message names the file and the line."""


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        texts: the cells by column.
    """

    texts: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        """The text of a cell, without spaces around it."""
        return self.texts[column].strip()

    @property
    def id(self) -> str:
        """Unique name of the run."""
        return self["id"]

    @property
    def source(self) -> str:
        """Where it was published, in a word: the first part of its id."""
        return self.id.split("-")[0].rstrip("0123456789")

    @property
    def seconds(self) -> float | None:
        """Published seconds of a step; None if the source does not say its batch."""
        text = self["step_time_s"]
        return float(text) if text else None

    def number(self, column: str) -> int | None:
        """A whole number; None if the cell is empty or has other text than a number.

        Thousands may be separated, and a remark in parentheses may follow.
        """
        found = _NUMBER.fullmatch(self.texts.get(column, "").strip())
        return int(found[1].replace(",", "")) if found else None


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file.

    Raises:
        RowError: the file is no CSV with the columns of `runs.csv`, or a cell is malformed.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(_rows(path, file.read()))
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(f"{path}: {error}") from None


def _rows(path: Path, text: str) -> Iterator[Row]:
    reader = csv.DictReader(text.splitlines(keepends=True), strict=True)
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise RowError(f"{path}: the first line has no column {', '.join(missing)}")
    ids = set[str]()
    try:
        for cells in reader:
            line = f"{path}, line {reader.line_num}"
            if None in cells or None in cells.values():
                raise RowError(f"{line}: the row has not as many cells as the first line")
            row = Row(cells)
            _check(row, line)
            if row.id in ids:
                raise RowError(f"{line}: the id {row.id!r} occurs twice")
            ids.add(row.id)
            yield row
    except csv.Error as error:
        raise RowError(f"{path}, line {reader.line_num}: {error}") from None


def _check(row: Row, line: str) -> None:
    if not row.id:
        raise RowError(f"{line}: the row has no id")
    for column in ("gpus", "gpus_per_node"):
        if not row.number(column):
            raise RowError(f"{line}: {column} is {row[column]!r}, which is no positive number")
    text = row["step_time_s"]
    try:
        is_positive = not text or float(text) > 0
    except ValueError:
        is_positive = False
    if not is_positive:
        raise RowError(f"{line}: step_time_s is {text!r}, which is no number of seconds")
