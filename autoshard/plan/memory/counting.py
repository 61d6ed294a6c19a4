"""Which collectives a step runs, from the plan alone."""

from collections import Counter
from collections.abc import Iterator, Sequence

from autoshard.graph import Graph
from autoshard.layouts import Action
from autoshard.plan.buckets import buckets_of
from autoshard.plan.document import CollectiveCount, Direction, PlannedStep, Stage, Use
from autoshard.plan.memory.recompute import recomputed


def count_collectives(
    stages: Sequence[Stage], graphs: Sequence[Graph]
) -> tuple[CollectiveCount, ...]:
    """The collectives of one step of a program, summed by kind, axis and direction.

    Args:
        stages: of a plan.
        graphs: the program of each stage.

    Raises:
        PlanError: a stage's checkpoints do not fit its program.
    """
    count: Counter[tuple[str, str, Direction]] = Counter()
    nbytes: Counter[tuple[str, str, Direction]] = Counter()
    for stage, graph in zip(stages, graphs, strict=True):
        for kind, axis, direction, size in _collectives(stage, graph):
            count[kind, axis, direction] += 1
            nbytes[kind, axis, direction] += size
    return tuple(
        CollectiveCount(
            kind=kind, axis=axis, direction=direction, count=n, nbytes=nbytes[kind, axis, direction]
        )
        for (kind, axis, direction), n in sorted(count.items())
    )


def _collectives(stage: Stage, graph: Graph) -> Iterator[tuple[str, str, Direction, int]]:
    again = recomputed(graph, stage)
    for node in stage.nodes:
        for inner in node.inside:
            yield inner.action, inner.axis, inner.direction, inner.nbytes
            if inner.direction == "forward" and node.name in again.nodes:
                yield inner.action, inner.axis, "backward", inner.nbytes
    together: set[Use] = set()
    for bucket in buckets_of(stage, graph):
        together.update(bucket.uses)
        for step, nbytes in bucket.steps:
            yield from _step(step, nbytes, again=bucket.uses[0] in again.reshardings)
    for resharding in stage.reshardings:
        if resharding.use not in together:
            for step in resharding.steps:
                yield from _step(step, step.nbytes, again=resharding.use in again.reshardings)


def _step(
    step: PlannedStep, nbytes: int, *, again: bool
) -> Iterator[tuple[str, str, Direction, int]]:
    if step.forward in _COLLECTIVES:
        yield step.forward, step.axis, "forward", nbytes
        if again:
            yield step.forward, step.axis, "backward", nbytes
    if step.backward in _COLLECTIVES:
        yield step.backward, step.axis, "backward", nbytes


_COLLECTIVES = frozenset(action.value for action in Action if action.is_collective)
