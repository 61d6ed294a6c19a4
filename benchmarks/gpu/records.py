"""Results in files: one for each part of a run, written whenever something was measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import Goal, goals_of

Header = Mapping[str, Any]
"""Where and when something was measured, and of which code."""

SAME = ("device", "card", "torch", "nccl", "code", "models")
"""Fields of a header in which results must agree to be of one run."""


@dataclass
class Record:
    """The results of one part.

    Attributes:
        path: the file.
        part: name of the part.
        header: where and when the part was measured.
        results: by name of the measurement.
        failures: error of each measurement or process that failed.
        complete: True if nothing is missing and nothing has failed.
    """

    path: Path
    part: str
    header: Header
    results: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def resumed(cls, folder: Path, part: str, header: Header) -> "Record":
        """The record in a folder, or a new one if that is of another run."""
        found = cls.read(folder / f"{part}.json")
        if found is None or any(found.header.get(name) != header.get(name) for name in SAME):
            return cls(folder / f"{part}.json", part, header)
        return found

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """The record in a file; None if there is none, or the file is damaged."""
        try:
            document = json.loads(path.read_bytes())
            fields = [document[name] for name in ("header", "results", "failures", "complete")]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(path, path.stem, *fields)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The goals of the part, with their outcomes."""
        return goals_of(self.part, self.header["device"], self.results, self.failures)

    def add(self, name: str, result: Mapping[str, Any] | None, error: str = "") -> None:
        """Write the result of a measurement, or why there is none."""
        if result is None:
            self.failures[name] = error
        else:
            self.failures.pop(name, None)
            self.results[name] = result
        self.write()

    def write(self) -> None:
        """Write the file in one piece: what reads it never finds a part of it."""
        document = {
            "header": self.header,
            "complete": self.complete,
            "goals": [goal.as_dict() for goal in self.goals],
            "failures": self.failures,
            "results": self.results,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
        partial.replace(self.path)
