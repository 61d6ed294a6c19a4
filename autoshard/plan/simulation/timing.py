"""How long each part of a stage takes, forward, once more and backward."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from autoshard.costs import Overlap, Passes, hidden_seconds
from autoshard.errors import PlanError
from autoshard.graph import Graph, Node
from autoshard.layouts import Action, Layout, Step, again_price, is_padded, parse_type
from autoshard.ops import call_of, rule_for
from autoshard.plan.buckets import Bucket, carried_beside
from autoshard.plan.document import PlacedNode, Plan, PlannedStep, Resharding, Stage, Use
from autoshard.plan.gradients import Gradient
from autoshard.plan.legality import share_of
from autoshard.plan.memory.recompute import recomputed
from autoshard.plan.pricing import Prices


@dataclass(frozen=True, slots=True)
class Piece:
    """A collective, or a local copy of a resharding, with the copies around it.

    Attributes:
        name: what runs.
        axis: name of the mesh axis.
        seconds: how long it takes.
        nbytes: size of the larger of a rank's tensor before and after.
    """

    name: str
    axis: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Split:
    """Pieces that run one after the other.

    Attributes:
        waited: those that compute waits for.
        overlapped: those that run beside compute, after the others; one piece may be in both.
    """

    waited: tuple[Piece, ...] = ()
    overlapped: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, pieces: Sequence[Piece], hidden: float) -> "Split":
        """The last so many seconds are hidden."""
        if hidden <= 0:
            return cls(tuple(pieces))
        left = sum(piece.seconds for piece in pieces) - hidden
        waited, beside = [], []
        for piece in pieces:
            seconds = min(max(left, 0.0), piece.seconds)
            left -= piece.seconds
            if seconds:
                waited.append(_lasting(piece, seconds))
            if piece.seconds > seconds:
                beside.append(_lasting(piece, piece.seconds - seconds))
        return cls(tuple(waited), tuple(beside))


@dataclass(frozen=True, slots=True)
class ReshardingTiming:
    """What a resharding runs.

    Attributes:
        forward: in the forward pass.
        again: once more in backward, if it does.
        backward: of its gradient.
    """

    forward: Split
    again: Split
    backward: Split


class Timing:
    """Seconds of the parts of a stage.

    Args:
        plan: the plan.
        stage: one of its stages.
        graph: the stage's program.
    """

    def __init__(self, plan: Plan, stage: Stage, graph: Graph) -> None:
        self.prices = Prices(graph, plan.mesh, plan.options)
        self._mesh = plan.mesh
        self._graph = graph
        self._gradients = self.prices.gradients
        self._placed = {placed.name: placed for placed in stage.nodes}
        self._again = recomputed(graph, stage).reshardings
        self._overlap = Overlap(graph, plan.mesh) if plan.options.overlap else None
        self._carried = carried_beside(graph, plan.mesh)
        self._known: dict[Hashable, Passes[float]] = {}

    def node(self, node: Node) -> Passes[float]:
        """Compute of an operator; alike ones are looked at once.

        Raises:
            PlanError: no rule of the operator allows the layouts of the plan.
        """
        placed = self._placed[node.name]
        kind = self._graph.kind(node)
        key = (kind, placed.inputs, placed.outputs, self._gradients.flows(node), placed.time)
        if key not in self._known:
            forward = self._forward(node, placed)
            self._known[key] = Passes(forward, max(placed.time - forward, 0.0))
        return self._known[key]

    def _forward(self, node: Node, placed: PlacedNode) -> float:
        uses = (self._gradients.of_use(value, node) for value in node.inputs)
        gradients = (
            *(gradient is not Gradient.NONE for gradient in uses),
            *(self._gradients.exists(value) for value in node.outputs),
        )
        layouts = [Layout.parse(text) for text in (*placed.inputs, *placed.outputs)]
        rule = rule_for(call_of(self._graph, node))
        share = share_of(rule, layouts, gradients, self._mesh.axis_sizes)
        if share is None:
            raise PlanError(
                f"no rule of {node.operator} allows the layouts of node {node.name!r}; "
                f"`autoshard check` says what else is wrong with the plan"
            )
        return self.prices.rank_compute(node, share.sizes).forward

    def resharding(self, resharding: Resharding) -> ReshardingTiming:
        """What a resharding runs, and what of it is hidden."""
        carried = self._carried.get(resharding.value, 1.0)
        shape = self._graph.values[resharding.value].shape
        pairs = [self._pieces(step, shape, carried) for step in resharding.steps]
        forward = [piece for pair in pairs for piece in islice(pair, 1) if piece.seconds]
        backward = [pair[1] for pair in reversed(pairs) if pair[1].seconds]
        again = forward if resharding.use in self._again else []
        early, late = self._hidden(resharding, forward, again, backward)
        trailing = min(late, _seconds(backward))
        return ReshardingTiming(
            Split.of(forward, early),
            Split.of(again, late - trailing),
            Split.of(backward, trailing),
        )

    def bucket(self, bucket: Bucket) -> dict[Use, ReshardingTiming]:
        """What the reshardings of a bucket run, for each of them.

        All that compute waits for is said of the first, as one piece for each step; what is
        hidden stays with its own. Every piece has the bytes of the bucket.
        """
        own = [self.resharding(resharding) for resharding in bucket.reshardings]
        nbytes = {step.axis: total for step, total in bucket.steps}
        return {
            use: ReshardingTiming(
                *(
                    Split(
                        tuple(_together([s.waited for s in splits], nbytes)) if i == 0 else (),
                        tuple(_together([splits[i].overlapped], nbytes)),
                    )
                    for splits in (
                        [timing.forward for timing in own],
                        [timing.again for timing in own],
                        [timing.backward for timing in own],
                    )
                )
            )
            for i, use in enumerate(bucket.uses)
        }

    def _pieces(
        self, step: PlannedStep, shape: Sequence[int], carried: float
    ) -> tuple[Piece, Piece]:
        """What a step of a tensor of a global shape runs forward and backward."""
        axis = self._mesh.axis_names.index(step.axis)
        source, target = parse_type(step.source), parse_type(step.target)
        priced = Step(
            axis=axis,
            source=source,
            target=target,
            nbytes=step.nbytes,
            forward=Action(step.forward),
            backward=Action(step.backward),
            padded=is_padded(source, target, shape, self._mesh.axis_sizes[axis]),
        )
        forward = min(again_price(priced, self._mesh, carried), step.time)
        return (
            Piece(step.forward, step.axis, forward, step.nbytes),
            Piece(step.backward, step.axis, step.time - forward, step.nbytes),
        )

    def _hidden(
        self,
        resharding: Resharding,
        forward: Sequence[Piece],
        again: Sequence[Piece],
        backward: Sequence[Piece],
    ) -> tuple[float, float]:
        """Seconds that run beside the reader's forward, and beside its backward."""
        number = self._graph.numbers.get(resharding.consumer or "")
        if self._overlap is None or number is None:
            return 0.0, 0.0
        reader = self._graph.nodes[number]
        share = self._overlap.share(reader, resharding.position)
        if share is None:
            return 0.0, 0.0
        compute = self.node(reader)
        early = Passes(_seconds(forward), 0.0), Passes(share * compute.forward, 0.0)
        late = _seconds(again) + _seconds(backward)
        both = Passes(0.0, late), Passes(0.0, share * compute.backward)
        return float(hidden_seconds(*early)), float(hidden_seconds(*both))


def _seconds(pieces: Sequence[Piece]) -> float:
    return sum(piece.seconds for piece in pieces)


def _together(members: Sequence[Sequence[Piece]], nbytes: Mapping[str, int]) -> Iterator[Piece]:
    """Alike pieces of several reshardings as one; each is on an axis of its own.

    Args:
        members: pieces of each resharding.
        nbytes: of all reshardings, by the axis of their steps.
    """
    seconds: dict[tuple[str, str], float] = {}
    for piece in chain.from_iterable(members):
        key = piece.name, piece.axis
        seconds[key] = seconds.get(key, 0.0) + piece.seconds
    for (name, axis), total in seconds.items():
        yield Piece(name, axis, total, nbytes[axis])


def _lasting(piece: Piece, seconds: float) -> Piece:
    return Piece(piece.name, piece.axis, seconds, piece.nbytes)
