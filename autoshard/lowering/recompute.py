"""Forward work that backward repeats to save memory: activation checkpoints and re-gathers.

A stage specifies it by checkpoints over consecutive nodes, and by reshardings whose `regather` is
set. The runtime repeats exactly the nodes and reshardings that are derived here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby, pairwise

from autoshard.costs import GATHERED_ONCE
from autoshard.errors import PlanError
from autoshard.graph import Block, Graph, Node, find_blocks, module_paths
from autoshard.layouts import Action
from autoshard.ops import (
    Call,
    ExtraTensor,
    SavedByAutograd,
    backward_workspace,
    call_of,
    saved_tensors,
)
from autoshard.plan.comparisons import RunAgain
from autoshard.plan.stage import Stage, Use


class Keeps(Enum):
    """The kind of tensors that autograd saves for an operation."""

    NOTHING = 0
    READ = 1
    """Only inputs."""
    MADE = 2
    """Outputs or internal tensors, and possibly inputs."""

    @classmethod
    def of(cls, saved: SavedByAutograd) -> "Keeps":
        """The kind for an operator, from the tensors that autograd saves."""
        if saved.outputs or saved.extras:
            return cls.MADE
        return cls.READ if saved.inputs else cls.NOTHING


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Forward work that backward runs a second time.

    Attributes:
        spans: indices of the nodes of each checkpoint, in program order.
        readers: for each resharding inside a checkpoint, the first node that reads its result;
            None for a resharding outside, and for a parameter that is gathered once per step.
        nodes: names of the nodes that run again.
        reshardings: uses of the reshardings that run again.
    """

    spans: tuple[range, ...]
    readers: tuple[int | None, ...]
    nodes: frozenset[str]
    reshardings: frozenset[Use]


def recomputed(graph: Graph, stage: Stage) -> Recomputed:
    """The nodes and reshardings that backward runs a second time.

    Raises:
        PlanError: the checkpoints do not fit the program, or a resharding inside one is
            `regather`.
    """
    spans = checkpoint_spans(graph, stage)
    readers = tuple(_readers_inside(graph, stage, spans))
    nodes: set[str] = set()
    entered: set[int] = set()
    for span in spans:
        entering, running = recomputed_part(
            span, lambda i: Keeps.of(saved_for(graph, graph.nodes[i]))
        )
        entered.update(entering)
        nodes.update(graph.nodes[i].name for i in running)
    reshardings = frozenset(
        resharding.use
        for resharding, reader in zip(stage.reshardings, readers, strict=True)
        if resharding.regather or reader in entered
    )
    return Recomputed(spans, readers, frozenset(nodes), reshardings)


def run_again(graph: Graph, stage: Stage, modules: Sequence[str]) -> RunAgain:
    """The gathers of parameters, and the units of checkpointing, that backward runs again.

    Args:
        graph: the program of a stage.
        stage: its layouts.
        modules: as in `checkpoint_units`.
    """
    names = {parameter.name for parameter in stage.parameters}
    gathers = [
        resharding.use
        for resharding in stage.reshardings
        if resharding.value in names
        and any(step.forward == Action.ALL_GATHER for step in resharding.steps)
    ]
    again = recomputed(graph, stage)
    units = checkpoint_units(graph, find_blocks(graph), modules)
    return RunAgain(
        gathered=len(gathers),
        gathered_again=sum(use in again.reshardings for use in gathers),
        blocks=len(units),
        recomputed=sum(
            any(span.start <= unit[0] and unit[-1] < span.stop for span in again.spans)
            for unit in units
        ),
    )


def checkpoint_units(
    graph: Graph, blocks: Sequence[Block], modules: Sequence[str]
) -> tuple[range, ...]:
    """The nodes of each part of a program that activation checkpointing recomputes as a whole.

    They are the instances of repeated blocks; or, if modules are named, the calls of the outermost
    modules with one of these names.

    Args:
        graph: the program.
        blocks: its repeated blocks.
        modules: dotted paths, or patterns in which `*` matches any text.

    Returns:
        Indices of consecutive nodes, in program order and without overlap.
    """
    if not modules:
        return tuple(nodes for block in blocks for nodes in block.instances())

    @cache
    def named(module: str) -> str:
        paths = module_paths(module)
        return next((p for p in paths if any(fnmatchcase(p, name) for name in modules)), "")

    units: list[range] = []
    numbers = range(len(graph.nodes))
    for path, members in groupby(numbers, key=lambda i: named(graph.nodes[i].module)):
        if path:
            first, *more = members
            units.extend(_calls(graph, range(first, first + len(more) + 1), blocks))
    return tuple(units)


def _calls(graph: Graph, nodes: range, blocks: Sequence[Block]) -> Iterator[range]:
    """The calls of a module among its consecutive nodes, which repeat if there are several."""

    def modules(instance: range) -> list[str]:
        return [graph.nodes[i].module for i in instance]

    start = nodes.start
    for block in blocks:
        if nodes.start <= block.start and block.stop <= nodes.stop:
            for before, after in pairwise(block.instances()):
                if modules(before) == modules(after):
                    yield range(start, after.start)
                    start = after.start
    yield range(start, nodes.stop)


def recomputed_part(span: range, keeps: Callable[[int], Keeps]) -> tuple[range, range]:
    """The part of a checkpoint that backward has to run again.

    All members before the last one for which autograd saves tensors run again. That last member
    runs only if autograd saves one of its outputs or internal tensors.

    Args:
        span: numbers of the members of the checkpoint, in program order.
        keeps: the kind of tensors that autograd saves for a member.

    Returns:
        The members whose inputs are recomputed, and those of them that also run.
    """
    # Results of the members after it are not needed in backward: recomputation stops early, as that
    # of `torch.utils.checkpoint` does.
    for last in reversed(span):
        kept = keeps(last)
        if kept is not Keeps.NOTHING:
            stop = last + 1 if kept is Keeps.MADE else last
            return range(span.start, last + 1), range(span.start, stop)
    return range(0), range(0)


def checkpoint_spans(graph: Graph, stage: Stage) -> tuple[range, ...]:
    """Indices of the nodes of each checkpoint of a stage, in program order.

    Raises:
        PlanError: a checkpoint names a node that does not exist, is empty or overlaps another
            one, or a resharding inside a checkpoint is `regather`.
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
                f"{where} overlaps the one before it; list checkpoints in program order, without "
                f"common nodes"
            )
        spans.append(span)
        free = span.stop
    readers = _readers_inside(graph, stage, spans)
    for resharding, reader in zip(stage.reshardings, readers, strict=True):
        if resharding.regather and reader is not None:
            raise PlanError(
                f"the resharding of {resharding.value!r} for {resharding.consumer or 'all'} is "
                f"`regather` inside a checkpoint, whose reshardings run again anyway"
            )
    return tuple(spans)


def _readers_inside(graph: Graph, stage: Stage, spans: Sequence[range]) -> Iterator[int | None]:
    """For each resharding, the first node that reads its result if it is inside a checkpoint."""
    if not spans:
        yield from (None for _ in stage.reshardings)
        return
    span_of = {i: span for span in spans for i in span}
    for resharding in stage.reshardings:
        if resharding.frequency in GATHERED_ONCE:
            yield None
            continue
        if resharding.consumer is not None:
            reader = graph.numbers.get(resharding.consumer, -1)
            yield reader if reader in span_of else None
            continue
        # Readers follow the producer, so if any of them is in its checkpoint, the first one is.
        reader = min((i for i, _ in graph.consumers.get(resharding.value, ())), default=-1)
        inside = reader in span_of and graph.makers.get(resharding.value) in span_of[reader]
        yield reader if inside else None


@dataclass(frozen=True, slots=True)
class Saving:
    """Differences from the tensors that autograd saves for backward in eager mode.

    Attributes:
        computed_again: values that compiled kernels compute again, so that they are not saved.
        in_float8: positions of the 16-bit inputs that a product saves in float8, by its name.
        for_free: positions of the inputs whose gradients need no saved tensor, by the name of the
            operator.
        compiled: names of the losses whose kernels of both passes a compiler generates.
        casts: names of the casts to a wider type that only such a loss reads; they save what they
            cast.
        unwritten: results of these casts, and views of them: neither they nor their gradients are
            ever in memory.
    """

    computed_again: frozenset[str] = frozenset()
    in_float8: Mapping[str, frozenset[int]] = field(default_factory=dict)
    for_free: Mapping[str, frozenset[int]] = field(default_factory=dict)
    compiled: frozenset[str] = frozenset()
    casts: frozenset[str] = frozenset()
    unwritten: frozenset[str] = frozenset()

    def cache_key(self, node: Node) -> tuple[bool, bool, bool]:
        """Key under which nodes with equal calls save the same tensors and write the same outputs.

        Values that are computed again are not part of it.
        """
        return (
            node.name in self.compiled,
            node.name in self.casts,
            not self.unwritten.isdisjoint(node.outputs),
        )

    def saved(self, node: Node, call: Call, gradients: Sequence[bool]) -> SavedByAutograd:
        """The tensors that are saved for a node, with those that are computed again.

        Args:
            node: the node.
            call: its call.
            gradients: for each input, True if its gradient is computed.
        """
        needed = self.needs_saved(node, gradients)
        saved = saved_tensors(call, needed, is_compiled=node.name in self.compiled)
        return replace(saved, inputs=frozenset({0})) if node.name in self.casts else saved

    def workspace(
        self, node: Node, call: Call, gradients: Sequence[bool]
    ) -> tuple[ExtraTensor, ...]:
        """The temporary tensors of the backward of a node; arguments as in `saved`."""
        return () if node.name in self.compiled else backward_workspace(call, gradients)

    def needs_saved(self, node: Node, gradients: Sequence[bool]) -> list[bool]:
        """For each input of a node, True if its gradient is computed and may need saved tensors."""
        for_free = self.for_free.get(node.name, ())
        return [flag and i not in for_free for i, flag in enumerate(gradients)]


AS_IN_EAGER = Saving()
"""No difference."""


def saved_for(graph: Graph, node: Node, saving: Saving = AS_IN_EAGER) -> SavedByAutograd:
    """The tensors that are saved for the backward of a node."""
    needed = [graph.values[v].requires_grad for v in node.inputs]
    return saved_by(graph, node, needed, saving)


def saved_by(
    graph: Graph, node: Node, gradients: Sequence[bool], saving: Saving
) -> SavedByAutograd:
    """The tensors that are saved for some gradients of a node.

    Args:
        graph: the program.
        node: one of its nodes.
        gradients: for each input, whether backward computes its gradient.
        saving: differences from eager mode.
    """
    saved = saving.saved(node, call_of(graph, node), gradients)
    again = saving.computed_again
    if again.isdisjoint((*node.inputs, *node.outputs)):
        return saved
    return replace(
        saved,
        inputs=frozenset(i for i in saved.inputs if node.inputs[i] not in again),
        outputs=frozenset(i for i in saved.outputs if node.outputs[i] not in again),
    )
