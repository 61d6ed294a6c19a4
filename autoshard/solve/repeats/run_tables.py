"""The tables of a run's groups, joined to one over its ends, and what they say of its inside."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.elimination import Evaluation, Table
from autoshard.solve.repeats.runs import Run
from autoshard.solve.repeats.template import GroupTable
from autoshard.solve.repeats.walks import Changing, Leaving, Steps

Course = Leaving | Changing
"""Which walks over the groups of a run count."""

RunTables = tuple[tuple[GroupTable, int], ...]
"""Tables of a run's groups in order, and of how many groups in a row each is."""


def alike_groups(run: Run, costs: Sequence[FloatArray]) -> tuple[tuple[int, int], ...]:
    """Groups that stand for others priced alike, and for how many in a row."""
    groups = run.instances
    inner, last = groups[min(1, len(groups) - 2)], groups[-1]
    if all(np.array_equal(costs[v], costs[w]) for v, w in zip(inner, last, strict=True)):
        return ((1, len(groups)),)
    return (min(1, len(groups) - 2), len(groups) - 1), (len(groups) - 1, 1)


def steps_over(tables: RunTables, courses: Sequence[Course]) -> Steps:
    """The steps of a walk over a run's groups."""
    table = tables[0][0]
    run = table.template.run
    num_steps = len(run.instances)
    stretches = [(part.as_batch(len(run.ports)), number) for part, number in tables]
    for course in courses:
        if course.run is not run:
            continue
        inside = np.ones(1, dtype=np.bool_)
        for axis, mask in enumerate(course.masks):
            inside = np.logical_and.outer(inside, mask[table.template.port_labels(axis)])
        inside = inside.ravel()
        if isinstance(course, Leaving):
            return Steps.leaving(stretches, inside)
        first = inside if course.inside_first else ~inside
        rest = num_steps - course.num_first
        return Steps.changing(stretches, ((first, course.num_first), (~first, rest)))
    return Steps.free(stretches)


def joined_table(tables: RunTables, steps: Steps) -> Table:
    """The price of all groups of a run together, by what is at its ends."""
    table = tables[0][0]
    run = table.template.run
    values = np.moveaxis(steps.joined(), 0, 2).reshape(table.values.shape)
    return Table((*run.before, *run.last_ports, *table.template.kept_hubs), values)


def write_choices(tables: RunTables, steps: Steps, result: Evaluation, choice: IntArray) -> None:
    """Write the choices of every group of a run, given those at its ends."""
    table = tables[0][0]
    run = table.template.run
    shape = table.values.shape[: len(run.ports)]
    state = 0
    hub_picks = tuple(result.picks[h] for h in table.template.kept_hubs)
    if hub_picks:
        hub_shape = table.values.shape[2 * len(run.ports) :]
        state = int(np.ravel_multi_index(hub_picks, hub_shape))
    first, last = (
        int(np.ravel_multi_index([result.picks[v] for v in nodes], shape))
        for nodes in (run.before, run.last_ports)
    )
    of_group = [part for part, (_, number) in enumerate(tables) for _ in range(number)]
    groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for k, step in enumerate(pairwise(steps.cheapest(state, first, last))):
        groups.setdefault((of_group[k], step), []).append(k)
    for (part, step), numbers in groups.items():
        seen = [int(i) for flat in step for i in np.unravel_index(flat, shape)]
        choice[run.places[numbers]] = tables[part][0].interior((*seen, *hub_picks))


def bounds_at_ports(run: Run, tables: RunTables, outside: FloatArray) -> dict[int, FloatArray]:
    """Least price of everything by strategy of each port, whichever group it is of.

    Args:
        run: the run.
        tables: of its groups, hubs relaxed.
        outside: price of everything else by the states at the two ends of the run.
    """
    table = tables[0][0]
    shape = table.values.shape[: len(run.ports)]
    matrices = [m for part, number in tables for m in [*part.as_batch(len(run.ports))] * number]
    ends = outside.reshape(matrices[0].shape)
    # What is outside joins the two ends; a part for each end is a lower bound of it.
    head = ends[:, int(ends.min(axis=0).argmin())]
    with np.errstate(invalid="ignore"):
        tail = np.nan_to_num(ends - head[:, None], nan=np.inf, posinf=np.inf).min(axis=0)
    forward, backward = [head], [tail]
    for matrix in matrices:
        forward.append((forward[-1][:, None] + matrix).min(axis=0))
    for matrix in reversed(matrices):
        backward.append((matrix + backward[-1][None, :]).min(axis=1))
    pairs = zip(forward, reversed(backward), strict=True)
    least = np.min([f + b for f, b in pairs], axis=0).reshape(shape)
    bounds = {}
    for axis, port in enumerate(run.last_ports):
        others = tuple(i for i in range(len(shape)) if i != axis)
        bounds[port] = np.full(table.template.num_strategies(port), np.inf)
        bounds[port][table.template.port_labels(axis)] = least.min(axis=others)
    return bounds
