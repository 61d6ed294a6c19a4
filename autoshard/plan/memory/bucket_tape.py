"""How the collectives of buckets begin and end among the instructions of a rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from autoshard.plan.buckets import Bucket
from autoshard.plan.document import Resharding, Use
from autoshard.plan.memory.moves import Moves
from autoshard.plan.memory.record import Form, Instruction, Record


class _UnderWay(NamedTuple):
    """A resharding of a bucket that has begun.

    Attributes:
        resharding: which one.
        moved: slot of what is in flight; None where nothing moves forward.
        gradient: slot through which the gradient comes.
        form: of what comes out.
        moves: what the steps do.
        is_view: whether what comes out lies in the memory of what is in flight.
    """

    resharding: Resharding
    moved: int | None
    gradient: int
    form: Form
    moves: Moves
    is_view: bool


class BucketTape:
    """Adds to a record what runs for buckets.

    Args:
        buckets: of a stage.
        record: where instructions are added.
        moves_for: what the steps of a resharding do to a tensor.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        record: Record,
        moves_for: Callable[[Resharding, Form], Moves],
    ) -> None:
        self._buckets = buckets
        self._record = record
        self._moves_for = moves_for
        self._under_way: dict[int, list[_UnderWay]] = {}
        self._bucket_of: dict[Use, int] = {}
        self._ended: dict[Use, int] = {}  # slot of what has come out of a bucket

    def begin(self, number: int, slots: Mapping[str, int], checkpoint: int = -1) -> None:
        """Start the collectives of the buckets that begin before a node.

        Args:
            number: of the node.
            slots: where each value is now.
            checkpoint: number of the checkpoint that the node is in; -1 for none.
        """
        for order, bucket in enumerate(self._buckets):
            here = bucket.begins <= number and bucket.checkpoint == checkpoint
            if here and order not in self._under_way:
                self._under_way[order] = [
                    self._begin(c, order, slots[c.value]) for c in bucket.reshardings
                ]
                self._bucket_of.update(dict.fromkeys(bucket.uses, order))

    def end(self, use: Use) -> int | None:
        """The slot of what is made for a use, once its bucket has come; None if it has none."""
        bucket = self._bucket_of.get(use)
        if bucket is None:
            return None
        if use not in self._ended:
            self._end(bucket)
        return self._ended[use]

    def _begin(self, resharding: Resharding, bucket: int, source: int) -> _UnderWay:
        """Two slots: what is in flight, if anything is, and through which the gradient comes."""
        before = self._record.forms[source]
        moves = self._moves_for(resharding, before)
        several = len(self._buckets[bucket].reshardings) > 1
        is_view = moves.is_view and not several
        form = Form(moves.nbytes, before.gradient, moves.shape, None)
        moved = None
        if not moves.in_place:
            sent = before.nbytes if several else 0
            flat = Form(moves.nbytes + sent, False, moves.shape, None)
            storage = self._record.add_storage()
            moved = self._record.add_slot(storage, flat)
        way = Form(moves.in_flight_backward, before.gradient, before.shape, None)
        gradient = self._record.add_slot(self._record.storages[source], way)
        self._record.instructions.append(
            Instruction(
                resharding.value,
                (source,),
                (gradient,) if moved is None else (moved, gradient),
                (),
                0,
                0,
                0,
                (moves.reduces_once,),
                use=resharding.use,
                uses=(resharding.use,),
                regather=resharding.regather and is_view,
                checkpoint=self._buckets[bucket].checkpoint,
                bucket=bucket,
            )
        )
        return _UnderWay(resharding, moved, gradient, form, moves, is_view)

    def _end(self, bucket: int) -> None:
        """Wait for a bucket, and take it apart."""
        members = self._under_way[bucket]
        several = len(members) > 1
        working = backward = 0
        targets = []
        for way in members:
            if way.moved is None:
                storage = self._record.storages[way.gradient]
            elif way.is_view:
                storage = self._record.storages[way.moved]
            else:
                storage = self._record.add_storage()
            targets.append(self._record.add_slot(storage, way.form))
            self._ended[way.resharding.use] = targets[-1]
            rest = len(way.resharding.steps) > 1
            working = max(working, way.moves.working if rest else 0)
            # Gradients are laid out rank by rank, or behind one another.
            laid_out = several and way.moved is not None
            backward += way.moves.nbytes if laid_out else way.moves.working_backward
        moved = tuple(way.moved for way in members if way.moved is not None)
        self._record.instructions.append(
            Instruction(
                members[0].resharding.value,
                (*(way.gradient for way in members), *moved),
                tuple(targets),
                (),
                0,
                working,
                backward,
                (False,) * (len(members) + len(moved)),
                uses=tuple(way.resharding.use for way in members),
                regather=members[0].resharding.regather and not members[0].is_view and bool(moved),
                checkpoint=self._buckets[bucket].checkpoint,
                bucket=bucket,
            )
        )
