"""The memory of FSDP2 with other modules wrapped than the plan gathers at a time.

`fully_shard` makes a unit of each module that it wraps, and one of what is left. A unit is gathered
and freed as a whole, and the next one is gathered while a unit runs. autoshard gathers parameters
as they are read, in buckets. Here the unsharded parameters and gradients of a plan's timeline are
replaced by those of units:

* the parameters of a unit, from when it begins until it ends, and the buffer of their all-gather
  until the next unit begins; in backward again, from when the unit after it begins; without
  resharding after forward, until its backward ends;
* its gradients, from when its backward begins, and the buffer of their reduction from when it ends,
  until the next unit's backward ends;
* of what no pattern names, the root unit, throughout the step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from autoshard.errors import OptionError
from autoshard.graph import module_paths
from autoshard.lowering.holders import UNSHARDED, Holding, Part, all_holdings
from autoshard.lowering.timeline import Phase, Timeline

_BACKWARD = frozenset({Phase.RECOMPUTE, Phase.BACKWARD})


@dataclass(frozen=True, slots=True)
class _Unit:
    """A wrapped module.

    Attributes:
        module: its dotted path.
        nbytes: of its unsharded parameters, of their gradients, and of these in the element type in
            which they are reduced.
        forward: first and last moment of its forward.
        backward: first and last moment of its backward.
    """

    module: str
    nbytes: tuple[int, int, int]
    forward: tuple[int, int]
    backward: tuple[int, int]


def wrapped(found: Timeline, patterns: Sequence[str], *, reshards: bool) -> tuple[Holding, ...]:
    """All that is in memory at any moment, with units of `fully_shard`.

    Args:
        found: the timeline of a plan in the pattern of FSDP2 or HSDP.
        patterns: dotted paths of wrapped modules, or patterns in which `*` matches any text; of
            nested modules that match, the outermost count.
        reshards: True if units other than the root are resharded after forward.

    Raises:
        OptionError: a pattern matches no module with parameters, or the step has no backward.
    """
    if found.turn is None:
        raise OptionError("wrap is about training: in inference a unit is gathered as it is read")
    others = (held for held in all_holdings(found) if not _is_of_unit(held))
    units = _units(found, patterns)
    return (*others, *_held(found, units, reshards=reshards))


def _is_of_unit(held: Holding) -> bool:
    return held.part in UNSHARDED or (held.part is Part.WORKING and held.of_parameter)


def _units(found: Timeline, patterns: Sequence[str]) -> list[_Unit]:
    """The wrapped modules, in the order of forward, and the root, first."""
    graph, stage = found.lowering.graph, found.lowering.stage
    gathered = {resharding.value for resharding in stage.reshardings}
    sums: dict[str, list[int]] = {"": [0, 0, 0]}
    for placed in stage.parameters:
        if placed.name not in gathered:
            continue
        tensor = graph.values[placed.name]
        unit = sums.setdefault(_unit_of(placed.target.rpartition(".")[0], patterns), [0, 0, 0])
        unit[0] += tensor.nbytes
        if tensor.requires_grad:
            unit[1] += tensor.nbytes
            unit[2] += tensor.numel * graph.reduced_dtype(placed.name).itemsize
    for pattern in patterns:
        if not any(fnmatchcase(module, pattern) for module in sums):
            raise OptionError(f"wrap: no module with sharded parameters matches {pattern!r}")
    end = len(found.moments) - 1
    spans = _spans(found, patterns)
    root = _Unit("", _three(sums.pop("")), (0, end - 1), (0, end - 1))
    units = [
        _Unit(name, _three(sizes), *spans[name]) for name, sizes in sums.items() if name in spans
    ]
    return [root, *sorted(units, key=lambda unit: unit.forward)]


def _three(sizes: list[int]) -> tuple[int, int, int]:
    parameters, gradients, reduced = sizes
    return parameters, gradients, reduced


def _spans(
    found: Timeline, patterns: Sequence[str]
) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """The first and the last moment of each unit, in forward and in backward."""
    graph = found.lowering.graph
    spans: dict[tuple[str, bool], tuple[int, int]] = {}
    for moment, (phase, name) in enumerate(found.moments):
        number = graph.numbers.get(name)
        if number is None:
            continue
        key = _unit_of(graph.nodes[number].module, patterns), phase in _BACKWARD
        first, last = spans.get(key, (moment, moment))
        spans[key] = min(first, moment), max(last, moment)
    units = {name for name, _ in spans}
    return {
        name: (spans[name, False], spans[name, True])
        for name in units
        if (name, False) in spans and (name, True) in spans
    }


def _unit_of(module: str, patterns: Iterable[str]) -> str:
    """The wrapped module that a module is in; empty for the root."""
    paths = (p for p in module_paths(module) if any(fnmatchcase(p, name) for name in patterns))
    return next(paths, "")


def _held(found: Timeline, units: Sequence[_Unit], *, reshards: bool) -> Iterator[Holding]:
    root, *inner = units
    turn = found.turn or 0

    def of(unit: _Unit, part: Part, nbytes: int, first: int, last: int) -> Holding:
        name = unit.module or "(root)"
        kept = first <= turn <= last
        module = unit.module or name
        return Holding("temporaries", part, name, module, nbytes, first, last, kept)

    end = root.forward[1]
    yield of(root, Part.UNSHARDED_PARAMETERS, root.nbytes[0], *root.forward)
    yield of(root, Part.UNSHARDED_GRADIENTS, root.nbytes[1], turn + 1, end)
    for unit in inner:
        ends = unit.forward[1] if reshards else unit.backward[1]
        yield of(unit, Part.UNSHARDED_PARAMETERS, unit.nbytes[0], unit.forward[0], ends)
    gathered = [unit for unit in units if unit.nbytes[0]] or [root]
    last = turn if reshards and inner else end
    starts = [unit.forward[0] for unit in gathered[1:]]
    for unit, until in zip(gathered, [*starts, last], strict=True):
        yield of(unit, Part.UNSHARDED_PARAMETERS, unit.nbytes[0], unit.forward[0], until)
    start = turn
    for unit in reversed(inner):
        if reshards:
            yield of(unit, Part.UNSHARDED_PARAMETERS, unit.nbytes[0], start, unit.backward[1])
        yield of(unit, Part.UNSHARDED_GRADIENTS, unit.nbytes[1], *unit.backward)
        # The next unit is gathered as soon as this one begins.
        start = unit.backward[0]
    for unit, following in pairwise([*reversed(inner), root]):
        until = following.backward[1]
        yield of(unit, Part.UNSHARDED_GRADIENTS, unit.nbytes[2], unit.backward[1], until)
