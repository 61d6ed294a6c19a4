"""Buckets: reshardings of parameters that share one collective per step.

A collective of a few bytes takes as long as its latency, and a model has many small parameters.
Reshardings of parameters that take the same steps are therefore put into *buckets*, as DDP and
FSDP do. The source of such a resharding exists from the start, so a bucket can begin before its
first reader (prefetch), and the reduction of its gradients can overlap with backward.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.graph import Graph, find_blocks
from autoshard.layouts import Action, is_bucketable, is_padded, parse_type
from autoshard.mesh import Mesh
from autoshard.plan.document import PlannedStep, Resharding, Stage, Use
from autoshard.plan.recompute import Recomputed, recomputed

SMALL = 2 * 2**20
"""Largest parameter that shares a bucket, in bytes: copying it costs less than a latency."""

LARGEST = 8 * 2**20
"""Bytes of the full parameters of a bucket. The first reader waits for all of it, and in
backward no byte of it moves before its last gradient is complete."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Reshardings whose collectives run together, step by step.

    Attributes:
        reshardings: in the order in which they are first read; their steps are on the same axes,
            with the same actions.
        begins: number of the node before which it begins.
        reader: number of the node that reads it first; the number of nodes if only the end of
            the program does.
        checkpoint: number of the checkpoint inside of which it runs; -1 for none.
    """

    reshardings: tuple[Resharding, ...]
    begins: int
    reader: int
    checkpoint: int = -1

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses that the reshardings are for."""
        return tuple(resharding.use for resharding in self.reshardings)

    @property
    def regather(self) -> bool:
        """Whether backward runs its forward steps again, apart from a checkpoint."""
        return self.reshardings[0].regather

    @property
    def steps(self) -> Iterator[tuple[PlannedStep, int]]:
        """Each step of the first resharding with the bytes of this step in all of them."""
        for steps in zip(*(resharding.steps for resharding in self.reshardings), strict=True):
            yield steps[0], sum(step.nbytes for step in steps)


def bucket_fill_factors(graph: Graph, mesh: Mesh) -> Mapping[str, float]:
    """Bytes of a full bucket relative to a parameter's own, by name of each small parameter.

    Prices of a parameter's reshardings use it: the members of its bucket are only known once
    there is a plan, and the price of a layer should not depend on the layers around it. A mesh
    with published prices counts one collective per tensor, so nothing is in it then.
    """
    if mesh.collectives is not None:
        return {}
    tensors = {parameter.name: graph.values[parameter.name] for parameter in graph.parameters}
    return {name: LARGEST / t.nbytes for name, t in tensors.items() if 0 < t.nbytes <= SMALL}


def buckets_of(stage: Stage, graph: Graph, again: Recomputed | None = None) -> tuple[Bucket, ...]:
    """The buckets of a stage, in the order in which they are first read.

    A resharding is in one if it makes a parameter whole and no other resharding of the parameter
    comes before it. Reshardings with `regather` share a bucket with those of the same instance
    of a repeated block; those that a checkpoint runs again, with others of that checkpoint.

    A bucket that gathers begins when the one before it is first read, so that one bucket is
    prefetched; the first one inside a checkpoint begins with the checkpoint. A bucket that only
    reduces gradients begins with the program and stays outside of checkpoints, where running it
    again would do nothing.

    Args:
        stage: of a plan.
        graph: the stage's program.
        again: `recomputed(graph, stage)`, if it is known already.

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
            # A re-gather saves memory: what one block needs is gathered at one time.
            block = blocks.get(reader, -1) if resharding.regather else None
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
        key: equal for those that may share a bucket.
    """

    reader: int
    resharding: Resharding
    checkpoint: int
    key: Hashable


def _gathers(resharding: Resharding) -> bool:
    return any(step.forward != Action.NOTHING for step in resharding.steps)


def _shared_steps(resharding: Resharding, stage: Stage, graph: Graph) -> Hashable | None:
    """A key that is equal where reshardings can share collectives; None where one cannot."""
    sizes = dict(stage.axes)
    tensor = graph.values[resharding.value]
    chain = []
    for step in resharding.steps:
        source, target = parse_type(step.source), parse_type(step.target)
        size = sizes.get(step.axis, 1)
        is_even = not is_padded(source, target, tensor.shape, size)
        if not (is_bucketable(source, target) and is_even and size > 1):
            return None
        chain.append((step.axis, source.kind, step.forward, step.backward))
    return (*chain, resharding.regather, tensor.dtype, tensor.requires_grad) if chain else None


def _blocks(graph: Graph) -> dict[int, int]:
    """Number of the block instance that each node is in."""
    instances = (nodes for block in find_blocks(graph) for nodes in block.instances())
    return {node: number for number, nodes in enumerate(instances) for node in nodes}


def _first_reader(resharding: Resharding, graph: Graph) -> int:
    end = len(graph.nodes)
    if resharding.consumer is not None:
        return graph.numbers.get(resharding.consumer, end)
    return min((number for number, _ in graph.consumers.get(resharding.value, ())), default=end)


def _packed(found: Sequence[_Member], graph: Graph) -> list[list[_Member]]:
    """The members of each bucket."""
    packed: list[list[_Member]] = []
    open_buckets: dict[Hashable, tuple[list[_Member], int]] = {}
    for member in found:
        nbytes = graph.values[member.resharding.value].nbytes
        members, filled = open_buckets.get(member.key, ([], LARGEST))
        if nbytes > SMALL:
            packed.append([member])
        elif filled + nbytes > LARGEST:
            packed.append([member])
            open_buckets[member.key] = packed[-1], nbytes
        else:
            members.append(member)
            open_buckets[member.key] = members, filled + nbytes
    return packed


def _scheduled(packed: Sequence[Sequence[_Member]], again: Recomputed) -> Iterator[Bucket]:
    """The buckets with the node before which each begins."""
    before = {-1: 0} | {number: span.start for number, span in enumerate(again.spans)}
    for members in packed:
        reader, first, checkpoint, _ = members[0]
        begins = 0
        if checkpoint >= 0 and first.use not in again.reshardings:
            # Backward runs the checkpoint up to where this is read: it must not have begun.
            begins = reader
        elif _gathers(first):
            begins, before[checkpoint] = before[checkpoint], reader
        yield Bucket(tuple(m.resharding for m in members), begins, reader, checkpoint)
