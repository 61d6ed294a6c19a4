"""The measurements of a calibration: how many are made, and the file in which they are kept."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch.distributed as dist

LARGE_SPREAD = 0.5
"""Spread of a measurement's runs from which it is repeated, and counts as disturbed."""

_NOTABLE_SHARE = 0.1
"""Share of disturbed measurements from which the result says so."""


@dataclass(frozen=True)
class CalibrationEffort:
    """Extent of a calibration.

    Attributes:
        sizes: sizes of collectives to fit to, bytes.
        checked: other sizes, at which the fit is checked, bytes.
        elements: sizes of activations for operators; by default typical ones of the device.
        num_passes: number of measurements of each size, of which the median is taken.
        num_rounds: number of measurements of each operator, likewise.
        num_runs: maximum number of runs in a measurement, after those to warm up.
        num_repeats: maximum number of times that a measurement is made if its runs differ much.
        seconds: duration of a measurement after which no further run starts.
    """

    sizes: tuple[int, ...]
    checked: tuple[int, ...]
    elements: tuple[int, ...] | None
    num_passes: int
    num_rounds: int
    num_runs: int
    num_repeats: int
    seconds: float


FULL = CalibrationEffort(
    sizes=tuple(1 << exponent for exponent in range(10, 29, 2)),
    checked=tuple(1 << exponent for exponent in range(21, 29, 2)),
    elements=None,
    num_passes=3,
    num_rounds=7,
    num_runs=20,
    num_repeats=3,
    seconds=0.5,
)
"""Collectives of 1 KiB to 256 MiB."""

QUICK = CalibrationEffort(
    sizes=tuple(1 << exponent for exponent in range(10, 25, 7)),
    checked=(1 << 21,),
    elements=(1 << 14, 1 << 18),
    num_passes=1,
    num_rounds=3,
    num_runs=6,
    num_repeats=2,
    seconds=0.1,
)
"""Collectives of 1 KiB, 128 KiB and 16 MiB, and about a tenth of the runs."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The result of a measurement.

    Attributes:
        seconds: what was measured; one number, or several.
        spread: difference of the quartiles of the runs, relative to their median.
    """

    seconds: tuple[float, ...]
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class CalibrationProgress:
    """Progress of a calibration.

    Attributes:
        stage: what is measured next.
        done: number of measurements that are made.
        total: number of all measurements.
    """

    stage: str
    done: int
    total: int


class Measurements:
    """Makes measurements, and keeps them in a file, so that a later calibration continues.

    The first rank reads and writes the file: a line with the settings, then a line for each
    measurement.

    Args:
        settings: what the measurements depend on; those with other settings are not used.
        total: number of measurements.
        path: the file; None to keep none.
        report: called before each measurement on the first rank.

    Attributes:
        num_kept: number of measurements in the file that are used.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        total: int,
        *,
        path: Path | None = None,
        report: Callable[[CalibrationProgress], None] = lambda _: None,
    ) -> None:
        self._total = total
        self._path = path if dist.get_rank() == 0 else None
        self._report = report if dist.get_rank() == 0 else (lambda _: None)
        first = json.dumps(settings)
        found: list[Any] = [self._read(first)]
        dist.broadcast_object_list(found, 0)
        self._known: dict[str, Timing] = found[0]
        self.num_kept = len(self._known)
        self._made: dict[str, Timing] = {}
        if self._path is not None:
            kept = [_line(name, timing) for name, timing in self._known.items()]
            self._path.write_text("\n".join([first, *kept, ""]), encoding="utf-8")

    def _read(self, settings: str) -> dict[str, Timing]:
        """The measurements in the file, up to the first damaged line."""
        found: dict[str, Timing] = {}
        if self._path is None or not self._path.exists():
            return found
        first, *lines = self._path.read_text(encoding="utf-8").split("\n")
        for line in lines if first == settings else ():
            try:
                name, seconds, spread = json.loads(line)
                found[str(name)] = Timing(tuple(map(float, seconds)), float(spread))
            except (ValueError, TypeError):
                break
        return found

    def take(self, stage: str, name: str, measure: Callable[[], Timing]) -> Timing:
        """Make a measurement on all ranks, unless the file has it.

        Args:
            stage: what it belongs to, for the report.
            name: of the measurement, unique.
            measure: returns the same on all ranks.
        """
        self._report(CalibrationProgress(stage, len(self._made), self._total))
        timing = self._known.get(name)
        if timing is None:
            timing = measure()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(_line(name, timing) + "\n")
        self._made[name] = timing
        return timing

    def discard(self) -> None:
        """Delete the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def remarks(self) -> tuple[str, ...]:
        """A sentence on measurements that other work has disturbed, if they are many."""
        disturbed = sum(timing.spread > LARGE_SPREAD for timing in self._made.values())
        if disturbed <= _NOTABLE_SHARE * len(self._made):
            return ()
        count = f"{disturbed} of {len(self._made)} measurements"
        return (f"in {count} the runs differed by more than {LARGE_SPREAD:.0%}",)


def _line(name: str, timing: Timing) -> str:
    return json.dumps([name, timing.seconds, timing.spread])


def spread_of(seconds: list[float]) -> float:
    """Difference of the quartiles relative to the median; 0 for fewer than four runs."""
    if len(seconds) < 4:  # noqa: PLR2004  quartiles of fewer say nothing
        return 0.0
    lower, _, upper = quantiles(seconds, n=4)
    return (upper - lower) / max(median(seconds), 1e-12)
