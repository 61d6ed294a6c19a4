"""Single changes of a recipe, each planned, and the one that helps most."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autoshard.errors import InputError
from autoshard.exports import (
    ProgramFacts,
    Recipe,
    layout_of,
    program_batch,
    program_facts,
    recipe_problems,
)
from autoshard.graph import Graph
from autoshard.mesh import Axis, Mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

_CLEAR = 0.99
"""A change helps if the step takes at most this share of its time before."""
_MOST_SECONDS = 20.0
"""Time limit of the plan of one change."""
_ZERO = {0: "no ZeRO", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
_FULL = 3
_DEGREES = {"tensor": "TP", "context": "CP", "pipeline": "PP", "experts": "EP"}
_VALUES = {
    "activation_checkpointing": ("never", "auto", "always"),
    "reshard_after_forward": ("never", "always"),
}
"""Options whose other values are tried."""


@dataclass(frozen=True)
class RecipeChange:
    """One change of a recipe, and its plan.

    Attributes:
        text: the setting after and before the change, such as `TP 4 instead of 8`.
        recipe: the recipe with the change.
        plan: its plan, without comparisons.
    """

    text: str
    recipe: Recipe
    plan: Plan


def recipe_mesh(recipe: Recipe, devices: Mesh, facts: ProgramFacts | None) -> Mesh:
    """The mesh of a recipe on devices, whose axes are not used.

    Raises:
        OptionError: its sizes do not divide the devices.
    """
    found = layout_of(recipe, devices.num_devices, facts)
    return Mesh(tuple(Axis(name, size) for name, size in found.axes), devices.topology)


def recipe_changes(
    recipe: Recipe, graph: Graph, devices: Mesh, options: PlanOptions, seconds: float
) -> tuple[RecipeChange, ...]:
    """The plans of a recipe with one setting changed, the fastest first.

    A step has as many sequences as before. Changes that cannot run, that do not fit into memory, or
    for which there is no time are left out.

    Args:
        recipe: the recipe.
        graph: the program of a micro-batch of all data-parallel ranks.
        devices: the devices; their axes are not used.
        options: of the request, without those of the recipe.
        seconds: time limit of all plans together.
    """
    facts, end = program_facts(graph), time.perf_counter() + seconds
    num_ranks = devices.num_devices
    found: list[RecipeChange] = []
    for text, changed in _changed(_with_program(recipe, num_ranks)):
        left = end - time.perf_counter()
        if left <= 0:
            break
        if recipe_problems(changed, num_ranks, devices.topology, facts):
            continue
        try:
            made = layout_of(changed, num_ranks, facts)
            own = options.with_values(
                **made.options.given, comparisons=False, time_limit=min(left, _MOST_SECONDS)
            )
            plan = make_plan(graph, recipe_mesh(changed, devices, facts), own)
        except InputError:
            continue  # this program cannot be sharded so
        if plan.found:
            found.append(RecipeChange(text, changed, plan))
    return tuple(sorted(found, key=_step_time))


def change_sentence(plan: Plan, changes: tuple[RecipeChange, ...]) -> str:
    """A sentence about the one change that helps most.

    Args:
        plan: of the recipe itself; a document without a plan if it does not fit into memory.
        changes: from `recipe_changes`.
    """
    if not changes:
        return "No single change of the recipe's settings that was tried can run here."
    best = changes[0]
    after = _step_time(best)
    tried = f"of {len(changes)} that were planned"
    peak = "" if best.plan.memory is None else f", a peak of {best.plan.memory.peak / 1e9:.3g} GB"
    if plan.costs is None:
        return f"This recipe does not run; with {best.text} it does: {1e3 * after:,.4g} ms{peak}."
    before = plan.costs.total
    if after > _CLEAR * before:
        return f"No single change of a setting makes the step clearly faster, {tried}."
    return (
        f"One change that helps most, {tried}: {best.text}: {1e3 * after:,.4g} ms instead of "
        f"{1e3 * before:,.4g} ms{peak}."
    )


def _step_time(change: RecipeChange) -> float:
    assert change.plan.costs is not None, "changes have a plan"
    return change.plan.costs.total


def _with_program(recipe: Recipe, num_ranks: int) -> Recipe:
    """The recipe with its number of micro-batches in place of their size on a rank."""
    recipe = recipe.on(num_ranks)
    size, number = program_batch(recipe, num_ranks), recipe.accumulation
    if recipe.global_batch is not None and size:
        number = recipe.global_batch // size
    return replace(recipe, micro_batch=None, global_batch=None, accumulation=number)


def _changed(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Each change in words, and the recipe with it."""
    if recipe.pattern != "layers":
        for name, word in _DEGREES.items():
            yield from _scaled(recipe, name, word)
    if recipe.replicate is not None and recipe.shard is None and recipe.zero:
        yield from _scaled(recipe, "replicate", "replicas")
    if recipe.pipeline > 1:
        yield from _scaled(recipe, "stages_per_rank", "stages of a rank")
    if recipe.pattern in ("megatron", "data"):
        yield from _with_other_zero(recipe)
    if recipe.pattern == "megatron" and recipe.tensor > 1:
        sequences = not recipe.sequence_parallel
        text = f"{'with' if sequences else 'without'} sequence parallelism"
        yield text, replace(recipe, sequence_parallel=sequences)
    for name, values in _VALUES.items():
        before = recipe.options.get(name)
        for value in values if before is not None else ():
            if value != before:
                options = {**recipe.options, name: value}
                words = name.replace("_", " ")
                yield f"{words} {value} instead of {before}", replace(recipe, options=options)


def _with_other_zero(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    for zero in (0, 1, 3):
        if zero != recipe.zero:
            regather = "always" if zero == _FULL else "auto"
            options = {**recipe.options, "reshard_after_forward": regather}
            text = f"{_ZERO[zero]} instead of {_ZERO[recipe.zero]}"
            yield text, replace(recipe, zero=zero, options=options)


def _scaled(recipe: Recipe, name: str, word: str) -> Iterator[tuple[str, Recipe]]:
    """A degree divided by powers of two down to 1, and doubled."""
    size: int = getattr(recipe, name)
    smaller = [size >> n for n in range(1, size.bit_length()) if size % (1 << n) == 0]
    for other in (*smaller, 2 * size):
        changes: dict[str, Any] = {name: other}
        if recipe.shard is not None and name != "stages_per_rank":
            changes["shard"] = None  # all ranks that are left
        if name in ("pipeline", "stages_per_rank"):
            changes["layers_of_stages"] = changes["layers_per_stage"] = None
        yield f"{word} {other} instead of {size}", replace(recipe, **changes)
