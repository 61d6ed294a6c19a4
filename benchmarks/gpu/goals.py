"""The goals for a card, and which of them results meet."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu.parts import MODELS

COMPILED, EAGER, TIME, MEMORY = 1.02, 1.03, 0.08, 0.03
"""Largest ratios of planned and written steps; largest relative errors of predictions."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, and what was measured.

    Attributes:
        name: what is wanted.
        outcome: "met", "missed", or "not measured".
        found: what was measured, in words.
    """

    name: str
    outcome: str
    found: str

    def as_dict(self) -> dict[str, str]:
        """For a file."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.outcome}: {self.name}{': ' * bool(self.found)}{self.found}"


def goals_of(
    part: str, device: str, results: Mapping[str, Any], failures: Mapping[str, str]
) -> tuple[Goal, ...]:
    """The goals of a part, with their outcomes; a CPU only shows that they can be found."""
    goals: tuple[Goal, ...] = ()
    if part == "models":
        goals = tuple(_of_models(results))
    elif part == "cases":
        goals = (_of_cases(results, failures),)
    if device == "cpu":
        return tuple(replace(goal, outcome="not measured") for goal in goals)
    return goals


def _of_models(results: Mapping[str, Any]) -> Iterator[Goal]:
    for kind, limit in ((", compiled", COMPILED), ("", EAGER)):
        ratios = {
            model: _ratio(results, f"{model}: planned{kind}", f"{model}: as written{kind}")
            for model in MODELS
        }
        name = f"planned{kind} at most {limit} of as written{kind}"
        yield _goal(name, ratios, {m: r is not None and r <= limit for m, r in ratios.items()})
    for quantity, unit, limit, written in (
        ("seconds", "time", TIME, ("planned", "as written")),
        ("peak", "memory", MEMORY, ("planned",)),
    ):
        ratios = {
            name: _accuracy(results.get(name), quantity)
            for model in MODELS
            for kind in written
            for name in (f"{model}: {kind}", f"{model}: {kind}, compiled")
        }
        met = {name: r is not None and abs(r - 1) <= limit for name, r in ratios.items()}
        yield _goal(f"predicted {unit} within {limit:.0%} of measured", ratios, met)


def _ratio(results: Mapping[str, Any], one: str, other: str) -> float | None:
    if one not in results or other not in results:
        return None
    return float(results[one]["seconds"] / results[other]["seconds"])


def _accuracy(result: Mapping[str, Any] | None, quantity: str) -> float | None:
    return None if result is None else float(result[f"predicted_{quantity}"] / result[quantity])


def _goal(name: str, ratios: Mapping[str, float | None], met: Mapping[str, bool]) -> Goal:
    found = ", ".join(f"{key} {ratio:.3f}" for key, ratio in ratios.items() if ratio is not None)
    measured = [key for key, ratio in ratios.items() if ratio is not None]
    if not all(met[key] for key in measured):
        return Goal(name, "missed", found)
    return Goal(name, "met" if len(measured) == len(ratios) else "not measured", found)


def _of_cases(results: Mapping[str, Any], failures: Mapping[str, str]) -> Goal:
    """All that this torch can run: a case that fails on CPUs as well is none of them."""
    failed = [name for name, one in results.items() if one["error"]]
    only_here = [name for name in failed if not results[name].get("error_on_cpu")]
    name = "all rank cases that the installed torch can run"
    passed = len(results) - len(failed)
    found = f"{passed} passed, {len(failed) - len(only_here)} fail on CPUs too"
    found += f", {len(only_here)} fail on this device only"
    if only_here:
        return Goal(name, "missed", found)
    return Goal(name, "not measured" if failures or not results else "met", found)
