"""Outcomes of loops: what the planned model printed, compared with one device."""

import re
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from autoshard.errors import AutoshardError
from benchmarks.habits.loops import Loop, Note, Run, parts_of, perturbed
from benchmarks.habits.models import Planned

EXACT = 1e-9
"""Tolerance in float64, relative to the largest element."""
_ZERO = 1e-4
"""Tensors whose elements are all below it are compared as if one were as large."""
_DISTURBANCE, _FACTOR = 1e-15, 1e3
"""Relative change of the weights on one device; how many times its effect is accepted."""

RIGHT, REFUSED, BY_TORCH, WRONG = "right", "refused", "refused by torch", "WRONG"
ON_ONE_DEVICE = "fails on one device"
OUTCOMES = (RIGHT, REFUSED, BY_TORCH, ON_ONE_DEVICE, WRONG)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a loop on a rank, or on all.

    Attributes:
        kind: one of `OUTCOMES`.
        step: number of notes that were right before it ended.
        text: the error, or what is wrong.
        where: the last lines of the traceback.
    """

    kind: str
    step: int = 0
    text: str = ""
    where: str = ""

    @property
    def cause(self) -> str:
        """The error without names and numbers, to count those that are alike."""
        text = self.text.partition("\n")[0]
        return re.sub(r"'[^']*'|\d[\d.e+-]*|\[[^\]]*\]|\([^)]*\)", "_", text)[:160]

    def as_json(self) -> dict[str, Any]:
        """As a mapping."""
        return asdict(self)


@dataclass(frozen=True)
class Expected:
    """What a loop prints on one device.

    Attributes:
        notes: what was printed.
        tolerances: of each note.
        error: if it fails there.
    """

    notes: Sequence[Note]
    tolerances: Sequence[float]
    error: str = ""


def expected(loop: Loop, one: Planned, two: Planned) -> Expected:
    """Run a loop on one device; twice, to see how much rounding matters."""
    runs = []
    for size in (0.0, _DISTURBANCE):
        parts = parts_of(one, two, lambda model, _: model)
        run = Run(loop, one.drawn, perturbed(parts, size) if size else parts)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.run()
        except Exception as error:  # noqa: BLE001  whatever fails on one device is not compared
            return Expected(run.notes.found, (), f"{type(error).__name__}: {error}")
        runs.append(run.notes.found)
    return Expected(runs[0], [_tolerance(a, b) for a, b in zip(*runs, strict=True)])


def _tolerance(note: Note, disturbed: Note) -> float:
    if note.value.shape != disturbed.value.shape or not note.value.numel():
        return EXACT
    finite = note.value.nan_to_num(0.0, 0.0, 0.0)
    moved = (finite - disturbed.value.nan_to_num(0.0, 0.0, 0.0)).abs().max()
    return max(EXACT * max(float(finite.abs().max()), _ZERO), _FACTOR * float(moved))


def compare(run: Run, wanted: Expected) -> Outcome:
    """Run a loop with planned models, and compare what it prints with one device."""
    error: Exception | None = None
    try:
        run.run()
    except Exception as raised:  # noqa: BLE001  every error is an outcome
        error = raised
    found = run.notes.found
    for number, note in enumerate(found):
        if number >= len(wanted.notes):
            return Outcome(WRONG, number, f"prints {note.name}, which one device does not")
        if difference := _difference(note, wanted.notes[number], wanted.tolerances[number]):
            return Outcome(WRONG, number, difference)
    if error is not None:
        kind = REFUSED if isinstance(error, AutoshardError) else BY_TORCH
        where = "".join(traceback.format_tb(error.__traceback__)[-6:])
        return Outcome(kind, len(found), f"{type(error).__name__}: {error}", where)
    if len(found) < len(wanted.notes):
        return Outcome(WRONG, len(found), f"does not print {wanted.notes[len(found)].name}")
    return Outcome(RIGHT, len(found))


def _difference(note: Note, wanted: Note, tolerance: float) -> str:
    """What is different; empty if nothing is."""
    if note.name != wanted.name:
        return f"prints {note.name} in place of {wanted.name}"
    one, other = note.value, note.part(wanted.value)
    if one.shape != other.shape:
        return f"{note.name}: shape {tuple(one.shape)} for {tuple(other.shape)}"
    special = ~torch.isfinite(other)
    if not torch.equal(one.isnan(), other.isnan()) or not torch.equal(
        one[special].nan_to_num(0.0), other[special].nan_to_num(0.0)
    ):
        return f"{note.name}: other elements are infinite or no numbers"
    apart = (one - other)[~special].abs()
    if apart.numel() and float(apart.max()) > tolerance:
        place = int((one - other).nan_to_num(0.0).abs().argmax())
        return (
            f"{note.name}: {float(one.flatten()[place]):.9g} for "
            f"{float(other.flatten()[place]):.9g} (tolerance {tolerance:.1e})"
        )
    return ""


def agreed(ranks: Sequence[Outcome]) -> Outcome:
    """The outcome of all ranks; wrong if they differ."""
    wrong = [o for o in ranks if o.kind == WRONG]
    if wrong:
        return wrong[0]
    kinds = {(o.kind, o.step, o.text.partition(":")[0]) for o in ranks}
    if len(kinds) == 1:
        return ranks[0]
    texts = "; ".join(f"rank {n}: {o.kind} after {o.step}: {o.text}" for n, o in enumerate(ranks))
    return Outcome(WRONG, min(o.step for o in ranks), f"ranks differ: {texts}")
