"""Which nodes are checkpointed together, and which reshardings with them."""

from collections.abc import Iterator, Sequence

from autoshard.errors import PlanError
from autoshard.graph import Graph
from autoshard.plan.document import Stage


def checkpoint_spans(graph: Graph, stage: Stage) -> tuple[range, ...]:
    """Which nodes each checkpoint of a stage has, as indices in program order.

    Raises:
        PlanError: a checkpoint names no node, is empty, or overlaps another one; or a
            resharding inside one is `regather`.
    """
    index = graph.numbers
    spans: list[range] = []
    free = 0
    for checkpoint in stage.checkpoints:
        where = f"the checkpoint from {checkpoint.first!r} to {checkpoint.last!r}"
        if checkpoint.first not in index or checkpoint.last not in index:
            raise PlanError(f"{where} is not between nodes of stage {stage.name!r}")
        span = range(index[checkpoint.first], index[checkpoint.last] + 1)
        if not span:
            raise PlanError(f"{where} ends before it begins")
        if span.start < free:
            raise PlanError(
                f"{where} does not begin behind the one that is listed before it; checkpoints "
                f"come in program order and share no node"
            )
        spans.append(span)
        free = span.stop
    insides = readers_inside(graph, stage, spans)
    for resharding, reader in zip(stage.reshardings, insides, strict=True):
        if resharding.regather and reader is not None:
            raise PlanError(
                f"the resharding of {resharding.value!r} for {resharding.consumer or 'all'} is "
                f"`regather` inside a checkpoint, whose reshardings run again anyway"
            )
    return tuple(spans)


def readers_inside(graph: Graph, stage: Stage, spans: Sequence[range]) -> Iterator[int | None]:
    """For each resharding inside a checkpoint the first node that reads its result, else None."""
    if not spans:
        yield from (None for _ in stage.reshardings)
        return
    span_of = {i: span for span in spans for i in span}
    for resharding in stage.reshardings:
        if resharding.consumer is not None:
            reader = graph.numbers.get(resharding.consumer, -1)
            yield reader if reader in span_of else None
            continue
        # Readers come behind the maker, so if one of them is in its checkpoint the first is.
        reader = min((i for i, _ in graph.consumers.get(resharding.value, ())), default=-1)
        inside = reader in span_of and graph.makers.get(resharding.value) in span_of[reader]
        yield reader if inside else None
