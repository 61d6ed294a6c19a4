"""Summary of a plan's parameters: one row for equal parameters of all layers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from autoshard.plan.document import PlacedInput, Plan

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
    """

    name: str
    count: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: str
    placements: tuple[str, ...]


def fold_parameters(plan: Plan) -> tuple[ParameterRow, ...]:
    """The parameters of a plan, with one row for equal parameters of all layers."""
    groups: dict[tuple[object, ...], dict[str, PlacedInput]] = {}
    for stage in plan.stages:
        for parameter in stage.parameters:
            pattern = _NUMBER.sub("*", parameter.target)
            key = (pattern, parameter.shape, parameter.layout, parameter.dtype)
            # Several stages may hold the same parameter.
            groups.setdefault(key, {})[parameter.target] = parameter
    return tuple(_row([*members.values()]) for members in groups.values())


def _row(members: list[PlacedInput]) -> ParameterRow:
    first = members[0]
    return ParameterRow(
        name=_folded_name([m.target for m in members]),
        count=len(members),
        shape=first.shape,
        local_shape=first.local_shape,
        layout=first.layout,
        placements=first.placements,
    )


def _folded_name(names: list[str]) -> str:
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
