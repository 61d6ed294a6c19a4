"""Rows of tables in which equal entries of all layers are one: parameters, and changes."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from autoshard.layouts import Action
from autoshard.plan.document import Plan
from autoshard.plan.stage import PlacedInput, Stage
from autoshard.report.compare import Change

_NODE_NUMBER = re.compile(r"_\d+$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """Parameters with equal layouts whose names differ only in numbers of layers.

    Attributes:
        name: dotted name; numbers that differ are written as a range, `h.{0..11}.attn`.
        count: number of parameters.
        shape: global shape of each.
        local_shape: shape of a rank's shard; of the largest one if they differ.
        layout: SPMD type per mesh axis.
        placements: DTensor placement per mesh axis.
        gradient: collectives of its gradient, such as "reduce-scatter over dp"; empty for none.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: str
    placements: tuple[str, ...]
    gradient: str


def fold_parameters(plan: Plan) -> tuple[ParameterRow, ...]:
    """The parameters of a plan, with one row for equal parameters of all layers."""
    groups: dict[tuple[object, ...], dict[str, PlacedInput]] = {}
    gradients: dict[tuple[object, ...], str] = {}
    for stage in plan.stages:
        collectives = _gradient_collectives(stage) if plan.options.mode == "training" else {}
        for parameter in stage.parameters:
            pattern = _NUMBER.sub("*", parameter.target)
            gradient = ", ".join(collectives.get(parameter.name, ()))
            key = (pattern, parameter.shape, parameter.layout, parameter.dtype, gradient)
            gradients[key] = gradient
            # Several stages may hold the same parameter.
            groups.setdefault(key, {})[parameter.target] = parameter
    return tuple(_row([*members.values()], gradients[key]) for key, members in groups.items())


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """Equal changes of things whose names differ only in numbers.

    Attributes:
        name: dotted name with ranges of numbers, or name of an operator with `*` for its number.
        count: number of changes.
        before: layouts in the first plan.
        after: layouts in the second plan.
    """

    name: str
    count: int
    before: str
    after: str


def fold_changes(changes: Iterable[Change]) -> tuple[ChangeRow, ...]:
    """Changes, with one row for equal changes of all layers."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in changes:
        pattern = _NODE_NUMBER.sub("_*", _NUMBER.sub("*", change.name))
        groups.setdefault((pattern, change.before, change.after), []).append(change.name)
    rows = []
    for (pattern, before, after), names in groups.items():
        name = names[0] if len(names) == 1 else pattern if "_*" in pattern else fold_names(names)
        rows.append(ChangeRow(name, len(names), before, after))
    return tuple(rows)


def _gradient_collectives(stage: Stage) -> dict[str, dict[str, None]]:
    """The collectives of the gradient of each parameter, in words, in the order of backward."""
    found: dict[str, dict[str, None]] = {}
    for resharding in stage.reshardings:
        for step in reversed(resharding.steps):
            if Action(step.backward).is_collective:
                text = f"{step.backward.replace('_', '-')} over {step.axis}"
                found.setdefault(resharding.value, {})[text] = None
    return found


def _row(members: list[PlacedInput], gradient: str) -> ParameterRow:
    first = members[0]
    return ParameterRow(
        name=fold_names([m.target for m in members]),
        count=len(members),
        shape=first.shape,
        local_shape=first.local_shape,
        layout=first.layout,
        placements=first.placements,
        gradient=gradient,
    )


def fold_names(names: Sequence[str]) -> str:
    """One text for names that differ only in numbers of layers: `h.{0..11}.attn`."""
    numbers = zip(*([int(n) for n in _NUMBER.findall(name)] for name in names), strict=True)
    ranges = iter([_ranges(column) for column in numbers])
    return _NUMBER.sub(lambda _: next(ranges), names[0])


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as text: `3`, `{0..11}`, or `{0..2,5}`."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    runs = []
    for _, run in groupby(enumerate(distinct), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}..{members[-1]}")
    return "{" + ",".join(runs) + "}"
