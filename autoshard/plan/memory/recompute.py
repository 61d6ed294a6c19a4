"""What runs once more in backward, from the plan alone.

Two parts of a stage say that something does: a resharding that is `regather`, and a
checkpoint. The runtime does exactly what is said here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from autoshard.graph import Graph, Node
from autoshard.ops import Saved, call_of, saved_by
from autoshard.plan.document import Stage, Use
from autoshard.plan.memory.spans import checkpoint_spans, readers_inside


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What runs forward once more during backward.

    Attributes:
        nodes: names of nodes.
        reshardings: what the reshardings are for.
    """

    nodes: frozenset[str]
    reshardings: frozenset[Use]


class Keeps(Enum):
    """What autograd keeps of a thing that runs."""

    NOTHING = 0
    READ = 1
    """Some of what it reads, and nothing else."""
    MADE = 2
    """Some of what it makes."""

    @classmethod
    def of(cls, saved: Saved) -> "Keeps":
        """What autograd keeps of an operator."""
        if saved.outputs or saved.extras:
            return cls.MADE
        return cls.READ if saved.inputs else cls.NOTHING


def taken_again(span: range, keeps: Callable[[int], Keeps]) -> tuple[range, range]:
    """What backward needs of a checkpoint, in program order.

    Everything up to the last thing of which autograd keeps something runs once more; that
    one itself only if it keeps what it makes, since what it reads is kept before it runs.

    Args:
        span: numbers of what is checkpointed together.
        keeps: what autograd keeps of one of them.

    Returns:
        those that take once more what they read, and those of them that also run.
    """
    for last in reversed(span):
        kept = keeps(last)
        if kept is not Keeps.NOTHING:
            stop = last + 1 if kept is Keeps.MADE else last
            return range(span.start, last + 1), range(span.start, stop)
    return range(0), range(0)


def recomputed(graph: Graph, stage: Stage) -> Recomputed:
    """What a stage runs once more.

    Of checkpoints it is what `taken_again` says, with the reshardings for it. A resharding
    that is `regather` runs once more as a whole.

    Raises:
        PlanError: the checkpoints do not fit the program, or a resharding inside one is
            `regather`.
    """
    spans = checkpoint_spans(graph, stage)
    nodes: set[str] = set()
    entered: set[int] = set()
    for span in spans:
        taking, running = taken_again(span, lambda i: Keeps.of(_saved(graph, graph.nodes[i])))
        entered.update(taking)
        nodes.update(graph.nodes[i].name for i in running)
    insides = readers_inside(graph, stage, spans)
    return Recomputed(
        frozenset(nodes),
        frozenset(
            resharding.use
            for resharding, reader in zip(stage.reshardings, insides, strict=True)
            if resharding.regather or reader in entered
        ),
    )


def _saved(graph: Graph, node: Node) -> Saved:
    return saved_by(call_of(graph, node), [graph.values[v].requires_grad for v in node.inputs])
