"""Buckets: reshardings of parameters that share one collective per step.

A collective of a few bytes costs its latency, and a model has many small parameters. As in DDP and
FSDP, reshardings of parameters with the same steps are therefore grouped into *buckets*. A
parameter is available from the start of a step, so a bucket can begin before its first reader
(prefetch), and the reduction of its gradients can overlap with backward.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.costs import Frequency, runs_per_step
from autoshard.graph import Graph, find_blocks
from autoshard.layouts import Action, is_bucketable, is_padded, parse_type
from autoshard.lowering.recompute import Recomputed, recomputed
from autoshard.plan.stage import PlannedStep, Resharding, Stage, Use

SMALL = 2 * 2**20
"""Maximum bytes of a parameter that shares a bucket: copying it costs less than a latency."""

LARGEST = 8 * 2**20
"""Maximum bytes of the full parameters of a shared bucket. The first reader waits for the whole
bucket, and in backward its reduction starts when its last gradient is complete."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Reshardings whose collectives run together, step by step.

    Attributes:
        reshardings: in the order in which they are first read; their steps are on the same axes,
            with the same actions.
        begins: number of the node before which it begins.
        reader: number of the node that reads it first; the number of nodes if only outputs do.
        checkpoint: number of the checkpoint inside of which it runs; -1 for none.
    """

    reshardings: tuple[Resharding, ...]
    begins: int
    reader: int
    checkpoint: int = -1

    @property
    def uses(self) -> tuple[Use, ...]:
        """The use of each resharding."""
        return tuple(resharding.use for resharding in self.reshardings)

    @property
    def regather(self) -> bool:
        """True if its reshardings are re-gathered in backward."""
        return self.reshardings[0].regather

    @property
    def frequency(self) -> Frequency:
        """Frequency of its reshardings in a training step of several micro-batches."""
        return self.reshardings[0].frequency

    def runs(self, micro_batches: int) -> list[tuple[int, int]]:
        """Number of runs of each step in a training step, in forward and in backward."""
        actions = [step.forward for step in self.reshardings[0].steps]
        return runs_per_step(actions, self.frequency, micro_batches)

    @property
    def steps(self) -> Iterator[tuple[PlannedStep, int, int]]:
        """Each step of the first resharding, and its bytes in all, forward and backward."""
        for steps in zip(*(resharding.steps for resharding in self.reshardings), strict=True):
            nbytes = sum(step.nbytes for step in steps)
            yield steps[0], nbytes, sum(step.backward_nbytes for step in steps)


def buckets_of(stage: Stage, graph: Graph, again: Recomputed | None = None) -> tuple[Bucket, ...]:
    """The buckets of a stage, in the order in which they are first read.

    A resharding is in a bucket if it makes a parameter whole and no other resharding of the
    parameter precedes it. Reshardings with `regather` share a bucket only within one instance of a
    repeated block, reshardings that a checkpoint runs again only within that checkpoint, and
    reshardings that run equally often in a training step only with each other.

    A bucket with an all-gather begins when the preceding bucket is first read, so that one bucket
    is prefetched; the first one inside a checkpoint begins with the checkpoint. A bucket that only
    reduces gradients begins with the program, outside of checkpoints.

    Args:
        stage: a plan's stage.
        graph: the stage's program.
        again: `recomputed(graph, stage)` if it was computed already.

    Raises:
        PlanError: the stage's checkpoints do not fit its program.
    """
    again = recomputed(graph, stage) if again is None else again
    number_of = {node: number for number, span in enumerate(again.spans) for node in span}
    shared = {c.value for c in stage.reshardings if c.consumer is None}
    parameters = {placed.name for placed in stage.parameters}
    blocks = _blocks(graph) if any(c.regather for c in stage.reshardings) else {}
    members: list[_Member] = []
    for resharding, inside in zip(stage.reshardings, again.readers, strict=True):
        first = resharding.consumer is None or resharding.value not in shared
        steps = _shared_steps(resharding, stage, graph)
        if resharding.value not in parameters or not first or steps is None:
            continue
        reader = _first_reader(resharding, graph)
        if inside is None or not _gathers(resharding):
            # Re-gathering saves memory only if a bucket is limited to one block.
            block = blocks.get(reader, -1) if resharding.regather else None
            # A bucket outside of a checkpoint must have ended before it: backward runs what is
            # inside again.
            if reader in number_of:
                reader = again.spans[number_of[reader]].start
            members.append(_Member(reader, resharding, -1, (steps, block)))
        else:
            key = steps, number_of[reader], resharding.use in again.reshardings
            members.append(_Member(reader, resharding, number_of[reader], key))
    members.sort(key=lambda member: member.reader)
    return tuple(_scheduled(_packed(members, graph), again))


class _Member(NamedTuple):
    """A resharding that is in a bucket.

    Attributes:
        reader: number of the node before which its result is needed.
        resharding: the resharding.
        checkpoint: number of the checkpoint inside of which it runs; -1 for none.
        key: equal for reshardings that may share a bucket.
    """

    reader: int
    resharding: Resharding
    checkpoint: int
    key: Hashable


def _gathers(resharding: Resharding) -> bool:
    return any(step.forward != Action.NOTHING for step in resharding.steps)


def _shared_steps(resharding: Resharding, stage: Stage, graph: Graph) -> Hashable | None:
    """A key, equal for reshardings that can share collectives; None if this one cannot."""
    sizes = dict(stage.axes)
    tensor = graph.values[resharding.value]
    chain = []
    for step in resharding.steps:
        source, target = parse_type(step.source), parse_type(step.target)
        num_ranks = step.num_ranks(sizes)
        is_even = not is_padded(source, target, tensor.shape, num_ranks)
        if not (is_bucketable(source, target) and is_even and num_ranks > 1):
            return None
        chain.append((step.axis, source.kind, step.forward, step.backward))
    name = resharding.value
    dtypes = graph.stored_dtype(name), tensor.dtype, graph.reduced_dtype(name)
    alike = resharding.regather, resharding.frequency, tensor.requires_grad
    return (*chain, *dtypes, *alike) if chain else None


def _blocks(graph: Graph) -> dict[int, int]:
    """The number of the block instance of each node, by number of the node."""
    instances = (nodes for block in find_blocks(graph) for nodes in block.instances())
    return {node: number for number, nodes in enumerate(instances) for node in nodes}


def _first_reader(resharding: Resharding, graph: Graph) -> int:
    end = len(graph.nodes)
    if resharding.consumer is not None:
        return graph.numbers.get(resharding.consumer, end)
    return min((number for number, _ in graph.consumers.get(resharding.value, ())), default=end)


def _packed(found: Sequence[_Member], graph: Graph) -> list[list[_Member]]:
    """Group members with equal keys into buckets of limited size."""
    packed: list[list[_Member]] = []
    open_buckets: dict[Hashable, tuple[list[_Member], int]] = {}
    for member in found:
        nbytes = graph.values[member.resharding.value].nbytes
        members, filled = open_buckets.get(member.key, ([], LARGEST))
        if nbytes > SMALL:
            packed.append([member])
        # In the order of readers, as they are sorted: a bucket is waited for by its first reader.
        elif filled + nbytes > LARGEST:
            packed.append([member])
            open_buckets[member.key] = packed[-1], nbytes
        else:
            members.append(member)
            open_buckets[member.key] = members, filled + nbytes
    return packed


def _scheduled(packed: Sequence[Sequence[_Member]], again: Recomputed) -> Iterator[Bucket]:
    """Determine the node before which each bucket begins."""
    before = {-1: 0} | {number: span.start for number, span in enumerate(again.spans)}
    for members in packed:
        reader, first, checkpoint, _ = members[0]
        begins = 0
        if checkpoint >= 0 and first.use not in again.reshardings:
            # Backward stops recomputing before this bucket is read, so it must not begin earlier.
            begins = reader
        elif _gathers(first):
            begins, before[checkpoint] = before[checkpoint], reader
        yield Bucket(tuple(m.resharding for m in members), begins, reader, checkpoint)
