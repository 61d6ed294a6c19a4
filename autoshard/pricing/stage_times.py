"""Seconds of a pipeline stage: of its operators and reshardings by pass, and of the whole stage.

A micro-batch has three passes, as zero-bubble schedules need them (Qi et al., "Zero bubble pipeline
parallelism", 2024): forward, the gradients of activations, and the gradients of parameters. What
runs once per step comes at its end.

| part            | seconds                                                                       |
|-----------------|-------------------------------------------------------------------------------|
| forward         | operators, collectives, arrival of user inputs                                |
| backward_input  | operators without the gradients of weights, collectives, what backward runs   |
|                 | again                                                                         |
| backward_weight | gradients of weights, their reductions in every micro-batch, and their sums   |
| end             | gathers and reductions of parameters that run once, the optimizer's update    |

A weight is a parameter, or a value that is computed from a single one, as in
`autoshard.costs.Overlap`. Of an operator that computes gradients of activations and of weights,
`backward_input` has the backward without the latter. A stage that computes all gradients at once
(`splits_backward`) has no `backward_weight`; `backward_input` is both.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard.base.collection import collection_paused
from autoshard.costs import ForwardBackward, Overlap, overlapped_seconds
from autoshard.errors import PlanError
from autoshard.graph import Graph, InputKind, Node
from autoshard.graph.gradients import Gradient
from autoshard.layouts import ALONE, Action, Layout, Step, is_padded, parse_type, step_price
from autoshard.lowering.buckets import Bucket, buckets_of
from autoshard.lowering.recompute import recomputed
from autoshard.mesh import Mesh
from autoshard.ops import call_of, rule_for, weights_of
from autoshard.ops.rules.legality import share_of
from autoshard.plan.document import StageTimes
from autoshard.plan.options import PlanOptions
from autoshard.plan.stage import PlacedNode, PlannedStep, Resharding, Stage, Use
from autoshard.pricing.prices import Prices


def splits_backward(stage: Stage) -> bool:
    """True if a zero-bubble schedule computes a stage's gradients of parameters apart.

    That is so if no collective and no recomputation would run in both parts of backward.
    """
    inside = any(step.direction == "backward" for node in stage.nodes for step in node.inside)
    return not (inside or stage.checkpoints or any(r.regather for r in stage.reshardings))


@collection_paused()
def stage_times(stage: Stage, graph: Graph, mesh: Mesh, options: PlanOptions) -> StageTimes:
    """Seconds of a stage by pass; the transfers to other stages are 0.

    The passes of all micro-batches and the end add up to the total cost of the stage's plan.

    Args:
        stage: the stage.
        graph: its program.
        mesh: its devices.
        options: the options of its plan.

    Raises:
        PlanError: the stage is inconsistent.
    """
    timing = StageTiming(stage, graph, mesh, options)
    inputs, number = timing.inputs(), stage.micro_batches
    forward, end = inputs.arriving / number, inputs.stored + inputs.update
    backward_input, backward_weight = 0.0, inputs.accumulation / number
    for node in graph.nodes:
        passes, inside = timing.node(node), timing.inside(node)
        weight = timing.weight_gradients(node)
        again = passes.forward + inside.forward if node.name in timing.again.nodes else 0.0
        forward += passes.forward + inside.forward
        backward_input += passes.backward - weight + inside.backward + again
        backward_weight += weight
    every, once = timing.communication()
    backward_input += every.again
    backward_weight += every.backward
    # Autograd would run collectives and recomputation in both parts; so all gradients are computed
    # at once.
    if not splits_backward(stage):
        backward_input, backward_weight = backward_input + backward_weight, 0.0
    return StageTimes(
        forward=forward + every.forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        end=end + once,
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """A collective or a local copy of a resharding, or a part of its duration.

    Attributes:
        name: name of the action.
        axis: name of the mesh axis.
        seconds: duration.
        nbytes: bytes of a rank's tensor before or after it, whichever is larger.
    """

    name: str
    axis: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Split:
    """Pieces that run one after the other.

    Attributes:
        exposed: the first pieces, which do not overlap with compute.
        overlapped: the later pieces, which do; one piece may be divided between both.
    """

    exposed: tuple[Piece, ...] = ()
    overlapped: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, pieces: Sequence[Piece], overlapped: float) -> "Split":
        """Split pieces so that the last `overlapped` seconds of them are overlapped."""
        if overlapped <= 0:
            return cls(tuple(pieces))
        left = _seconds(pieces) - overlapped
        exposed, beside = [], []
        for piece in pieces:
            seconds = min(max(left, 0.0), piece.seconds)
            left -= piece.seconds
            if seconds:
                exposed.append(replace(piece, seconds=seconds))
            if piece.seconds > seconds:
                beside.append(replace(piece, seconds=piece.seconds - seconds))
        return cls(tuple(exposed), tuple(beside))


@dataclass(frozen=True, slots=True)
class ReshardingTiming:
    """Pieces of a resharding: in forward, re-gathered in backward, and of its gradient."""

    forward: Split
    again: Split
    backward: Split


class InputSeconds(NamedTuple):
    """Seconds of the inputs of a stage per step.

    Attributes:
        arriving: of user inputs.
        stored: of inputs that are not trained.
        accumulation: sums of gradients over micro-batches.
        update: the optimizer's update.
    """

    arriving: float
    stored: float
    accumulation: float
    update: float


class StageCommunication(NamedTuple):
    """Seconds of the reshardings of a stage in a micro-batch.

    Attributes:
        forward: in forward.
        again: with gradients of activations: their reshardings, and what backward runs again.
        backward: reductions of gradients of weights.
    """

    forward: float
    again: float
    backward: float


class StageTiming:
    """Seconds of the operators and reshardings of a stage, by pass.

    Args:
        stage: the stage.
        graph: its program.
        mesh: its devices.
        options: the options of its plan.
    """

    def __init__(self, stage: Stage, graph: Graph, mesh: Mesh, options: PlanOptions) -> None:
        self.prices = Prices(graph, mesh, options)
        self.gradients = self.prices.gradients
        self._mesh = mesh
        self._stage = stage
        self._graph = graph
        self._placed = {placed.name: placed for placed in stage.nodes}
        self.again = recomputed(graph, stage)
        self._overlap = Overlap(graph, mesh) if self.prices.overlaps else None
        self._weights = weights_of(graph)
        self._buckets = buckets_of(stage, graph, self.again)
        self._bucketed = {use: bucket for bucket in self._buckets for use in bucket.uses}
        self._known: dict[Hashable, ForwardBackward[float]] = {}
        self._sizes: dict[Hashable, Mapping[str, int]] = {}

    def inputs(self) -> InputSeconds:
        """Seconds of the inputs per step."""
        arriving = stored = update = accumulation = 0.0
        inputs = {i.name: i for i in self._graph.inputs}
        for placed in self._stage.inputs:
            graph_input = inputs[placed.name]
            time, usage = self.prices.input(graph_input, [placed.local_shape])
            if placed.kind == "parameter" and self.gradients.exists(placed.name):
                dtype = self._graph.stored_dtype(placed.name)
                summed = self.prices.accumulation_time(dtype) * float(usage["gradients"][0])
                accumulation += summed
                update += float(time[0]) - summed
            elif graph_input.kind is InputKind.USER:
                arriving += float(time[0])
            else:
                stored += float(time[0])
        accumulation += self.prices.full_accumulation(self._stage.reshardings)
        return InputSeconds(arriving, stored, accumulation, update)

    def node(self, node: Node) -> ForwardBackward[float]:
        """Seconds of an operator's compute in a micro-batch; equal operators are priced once.

        Raises:
            PlanError: no rule of the operator allows the layouts of the plan.
        """
        placed = self._placed[node.name]
        kind = self.prices.kind(node)
        key = (kind, placed.inputs, placed.outputs, self.gradients.flows(node), placed.time)
        if key not in self._known:
            forward = self.prices.rank_compute(node, self._rank_sizes(node)).forward
            both = placed.time / self._stage.micro_batches
            self._known[key] = ForwardBackward(forward, max(both - forward, 0.0))
        return self._known[key]

    def weight_gradients(self, node: Node) -> float:
        """Seconds of an operator's backward in a micro-batch that compute gradients of weights."""
        weights = frozenset(v for v in node.inputs if v in self._weights)
        if not weights or not self.gradients.flows(node):
            return 0.0
        seconds = self.prices.weight_gradients(node, self._rank_sizes(node), weights)
        return min(seconds, self.node(node).backward)

    def inside(self, node: Node) -> ForwardBackward[float]:
        """Seconds of the collectives inside an operator in a micro-batch."""
        seconds = {"forward": 0.0, "backward": 0.0}
        for step in self._placed[node.name].inside:
            seconds[step.direction] += step.time / self._stage.micro_batches
        return ForwardBackward(seconds["forward"], seconds["backward"])

    def communication(self) -> tuple[StageCommunication, float]:
        """Seconds of exposed reshardings in every micro-batch, and those that run once per step."""
        number = self._stage.micro_batches
        every = self._exposed(first=number == 1, last=number == 1)
        if number == 1:
            return every, 0.0
        # What runs once is in the first micro-batch (gathers) or in the last one (reductions): what
        # they have more than one in the middle.
        first, last = self._exposed(first=True, last=False), self._exposed(first=False, last=True)
        return every, max(sum(first) + sum(last) - 2 * sum(every), 0.0)

    def _exposed(self, *, first: bool, last: bool) -> StageCommunication:
        """Seconds of the reshardings of a micro-batch that do not overlap with compute."""
        forward = again = backward = 0.0
        for use, timing in self.reshardings(bucketed=False, first=first, last=last).items():
            forward += _seconds(timing.forward.exposed)
            again += _seconds(timing.again.exposed)
            reduction = _seconds(timing.backward.exposed)
            if use[0] in self._weights:
                backward += reduction
            else:
                again += reduction
        return StageCommunication(forward, again, backward)

    def _rank_sizes(self, node: Node) -> Mapping[str, int]:
        """Size of each index letter of an operator on a rank."""
        placed = self._placed[node.name]
        key = (self._graph.kind(node), placed.inputs, placed.outputs, self.gradients.flows(node))
        if key not in self._sizes:
            self._sizes[key] = self._new_sizes(node, placed)
        return self._sizes[key]

    def _new_sizes(self, node: Node, placed: PlacedNode) -> Mapping[str, int]:
        uses = (self.gradients.of_use(value, node) for value in node.inputs)
        gradients = (
            *(gradient is not Gradient.NONE for gradient in uses),
            *(self.gradients.exists(value) for value in node.outputs),
        )
        layouts = [Layout.parse(text) for text in (*placed.inputs, *placed.outputs)]
        rule = rule_for(call_of(self._graph, node))
        share = share_of(rule, layouts, gradients, self._mesh.axis_sizes)
        if share is None:
            raise PlanError(
                f"no rule of {node.operator} allows the layouts of node {node.name!r}; "
                f"run `autoshard check` for all errors of the plan"
            )
        return share.sizes

    def reshardings(
        self, *, bucketed: bool, first: bool, last: bool
    ) -> dict[Use, ReshardingTiming]:
        """Pieces of every resharding in a micro-batch; those of a bucket are merged.

        Args:
            bucketed: True to merge.
            first: True for the first micro-batch of a step.
            last: True for the last one.
        """
        found = {
            c.use: self._resharding(c, first=first, last=last) for c in self._stage.reshardings
        }
        if bucketed:
            for bucket in self._buckets:
                found.update(_bucket_timing(bucket, [found[use] for use in bucket.uses]))
        return found

    def _resharding(self, resharding: Resharding, *, first: bool, last: bool) -> ReshardingTiming:
        micro_batches, bucket = self._stage.micro_batches, self._bucketed.get(resharding.use)
        runs = [(micro_batches, micro_batches)] * len(resharding.steps)
        if bucket is not None:
            runs = bucket.runs(micro_batches)
        forward: list[Piece] = []
        backward: list[Piece] = []
        for step, (gathers, reductions) in zip(resharding.steps, runs, strict=True):
            moved, reduced = self._pieces(step, resharding.value, gathers, reductions)
            if moved.seconds and (first or gathers > 1):
                forward.append(moved)
            if reduced.seconds and (last or reductions > 1):
                backward.insert(0, reduced)
        again = forward if resharding.use in self.again.reshardings else []
        early, late = self._overlapped(resharding, forward, [*again, *backward])
        # What overlaps is the last that runs: the reduction, and before it what is gathered again.
        trailing = min(late, _seconds(backward))
        return ReshardingTiming(
            Split.of(forward, early),
            Split.of(again, late - trailing),
            Split.of(backward, trailing),
        )

    def _pieces(
        self, step: PlannedStep, value: str, gathers: int, reductions: int
    ) -> tuple[Piece, Piece]:
        """The forward and the backward action of a step, each in one of its runs."""
        sizes = dict(zip(self._mesh.axis_names, self._mesh.axis_sizes, strict=True))
        source, target = parse_type(step.source), parse_type(step.target)
        shape = self._graph.values[value].shape
        priced = Step(
            axes=tuple(map(self._mesh.axis_names.index, step.axes)),
            source=source,
            target=target,
            nbytes=step.nbytes,
            gradient_nbytes=step.gradient_nbytes,
            forward=Action(step.forward),
            backward=Action(step.backward),
            padded=is_padded(source, target, shape, step.num_ranks(sizes)),
        )
        factor = self.prices.charges.get(value, ALONE)
        forward = min(step_price(priced, self._mesh, factor).forward, step.time / gathers)
        backward = (step.time - gathers * forward) / reductions
        return (
            Piece(step.forward, step.axis, forward, step.nbytes),
            Piece(step.backward, step.axis, backward, step.backward_nbytes),
        )

    def _overlapped(
        self, resharding: Resharding, early: Sequence[Piece], late: Sequence[Piece]
    ) -> tuple[float, float]:
        """Seconds that overlap with the reader's forward, and with its backward."""
        number = self._graph.numbers.get(resharding.consumer or "")
        if self._overlap is None or number is None:
            return 0.0, 0.0
        reader = self._graph.nodes[number]
        share = self._overlap.share(reader, resharding.position)
        if share is None:
            return 0.0, 0.0
        compute = self.node(reader)
        first = ForwardBackward(_seconds(early), 0.0), ForwardBackward(share * compute.forward, 0.0)
        second = (
            ForwardBackward(0.0, _seconds(late)),
            ForwardBackward(0.0, share * compute.backward),
        )
        contention = self._mesh.topology.device.contention
        return (
            float(overlapped_seconds(*first, contention=contention)),
            float(overlapped_seconds(*second, contention=contention)),
        )


def _seconds(pieces: Iterable[Piece]) -> float:
    return sum(piece.seconds for piece in pieces)


def _bucket_timing(
    bucket: Bucket, own: Sequence[ReshardingTiming]
) -> Iterator[tuple[Use, ReshardingTiming]]:
    """Merge the pieces of the reshardings of a bucket.

    All exposed pieces become pieces of the first resharding, one for each step; overlapped pieces
    stay with their reshardings. Every piece has the bytes of the whole bucket.
    """
    nbytes = {step.axis: forward for step, forward, _ in bucket.steps}
    reduced = {step.axis: backward for step, _, backward in bucket.steps}
    passes = [[getattr(t, name) for t in own] for name in ("forward", "again", "backward")]
    for i, use in enumerate(bucket.uses):
        exposed = [[p for s in splits for p in s.exposed] if i == 0 else [] for splits in passes]
        triples = zip(exposed, passes, (nbytes, nbytes, reduced), strict=True)
        yield (
            use,
            ReshardingTiming(
                *(
                    Split(_merged(all_exposed, total), _merged(splits[i].overlapped, total))
                    for all_exposed, splits, total in triples
                )
            ),
        )


def _merged(pieces: Iterable[Piece], nbytes: Mapping[str, int]) -> tuple[Piece, ...]:
    """Merge pieces with equal actions on one axis; the steps of a bucket are on different axes.

    Args:
        pieces: pieces of the reshardings of a bucket.
        nbytes: total bytes of the reshardings, by the axis of the step.
    """
    seconds: dict[tuple[str, str], float] = {}
    for piece in pieces:
        key = piece.name, piece.axis
        seconds[key] = seconds.get(key, 0.0) + piece.seconds
    return tuple(Piece(name, axis, s, nbytes[axis]) for (name, axis), s in seconds.items())
