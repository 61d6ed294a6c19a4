"""What an operator may do on a mesh: its rule, and the strategies that follow from it.

A rule names the operator's index space with letters, as einsum does. `x[b,s,k] @ w[n,k]`
has the letters b, s, n, k. A dim of a tensor is a product of letters, major first: a view
from [b*s, h] to [b, s, h] has the input dims (b s), (h). What one mesh axis may do follows:

* everything `I`, or everything `R`: true of every differentiable operator;
* cut a letter: tensors that have it are `S`, the others `R`; outputs that lost it to a sum
  are `P`, and those that lost it to statistics that ranks put together inside are `I`;
* linearity: where the operator is linear in a group of inputs, `P` in gives `P` out.

An axis that does not divide a letter may still cut it, into slices of unequal length, where the
letter is a dim by itself in every tensor that has it: two dims that a view merges are cut
elsewhere than what they make together.

A strategy is one such option per axis, applied from the outermost axis inwards: the next
axis sees the operator that the previous ones left.

A dim may also hold several things one after the other, which a split takes apart and a join
puts there. Its letter is then made of *pieces*. Cut as one it would leave a rank with all of one
piece and nothing of another; cut in chunks it leaves a slice of each. Such types are many and
rarely of use, so they are offered only for tensors of which the caller says so.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from autoshard.layouts import AxisType, I, Layout, P, R, S, cuts_unevenly, largest_share
from autoshard.ops.halo import NO_HALO, Halo
from autoshard.ops.pieces import Pieces, within_pieces
from autoshard.ops.reduction import NO_REDUCTIONS, InnerCollective, Reductions

Dims = tuple[tuple[str, ...], ...]
"""The letters of each dim of one tensor, major first; () for a dim of size 1."""

Chunked = Sequence[Collection[AxisType]]
"""The types with chunks that each tensor of a call can have, inputs before outputs; empty where
none has any."""


@dataclass(frozen=True)
class OperatorRule:
    """The rule of one operator call.

    Attributes:
        sizes: size of each letter.
        inputs: letters of each tensor input, in the order of `Node.inputs`.
        outputs: letters of each output.
        contracted: letters that are summed over; cutting one makes the outputs partial.
        whole: letters that may not be cut.
        linear: groups of inputs (by position) in which the operator is jointly linear,
            the other inputs held fixed.
        addends: inputs that are added to a contraction, and so must enter its sum once.
        unaffected: outputs that come out whole from a cut of a letter that they lack.
        reduced: what ranks put together inside the operator where a letter is cut.
        halo: what they need of their neighbours' slices where a letter is cut; one axis may
            cut such a letter, since an axis knows its own neighbours only.
        pieces: of letters that others follow each other in; only their chunks may be cut.
        ordered: letters along which a rank must know where its elements are in the whole, so
            that they must lie in one row.
        causal: letters of rows and of columns, if a row sees the columns up to its own place
            only and the others are not computed.
        uneven: letters that one axis may cut into slices of unequal length.
        follows: letters that are cut along with a letter.
        flops_per_point: floating-point operations per point of the index space.
    """

    sizes: Mapping[str, int]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    contracted: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    unaffected: frozenset[int] = frozenset()
    reduced: Reductions = NO_REDUCTIONS
    halo: Halo = NO_HALO
    pieces: Mapping[str, Pieces] = field(default_factory=dict)
    ordered: frozenset[str] = frozenset()
    causal: tuple[str, str] | None = None
    uneven: frozenset[str] = frozenset()
    follows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flops_per_point: float = 0.0

    def can_cut(self, letter: str, parts: int) -> bool:
        """Whether an axis of so many ranks may cut a letter as one."""
        size = self.sizes[letter]
        if letter in self.whole or not size:
            return False
        if any(self.sizes[other] % parts for other in self.follows.get(letter, ())):
            return False
        if not self.halo.allows(letter, self.sizes, parts):
            return False
        return size % parts == 0 or (letter in self.uneven and cuts_unevenly(size, parts))

    def cut(self, letter: str, parts: int) -> "OperatorRule":
        """The rule of the largest share that a rank has after an axis cut a letter.

        Slices of unequal length are not cut again, nor is a slice cut unevenly. A letter that
        another one has been cut without no longer follows that one.
        """
        pieces = (piece for _, piece in self.pieces.get(letter, ()) if piece)
        cut = (letter, *pieces, *self.follows.get(letter, ()))
        left = frozenset(x for x, others in self.follows.items() if letter in others)
        again = self.sizes[letter] % parts == 0 and letter not in self.halo.edges
        return replace(
            self,
            sizes={**self.sizes, **{x: largest_share(self.sizes[x], parts) for x in cut}},
            whole=self.whole | left if again else self.whole | left | {letter},
            uneven=self.uneven - {letter},
        )

    def collectives(
        self, cuts: Iterable[tuple[int, str | None]], sizes: Mapping[str, int]
    ) -> tuple[InnerCollective, ...]:
        """What ranks run inside the operator, in order.

        Args:
            cuts: axes, and the letter that each of them cuts; None for none.
            sizes: letter sizes on a rank, after all cuts.
        """
        cuts = tuple(cuts)
        return (
            *self.reduced.collectives(cuts, sizes),
            *self.halo.collectives(cuts, self.sizes, sizes),
        )

    @property
    def communicates(self) -> bool:
        """Whether ranks run something inside the operator where some letter is cut."""
        return bool(self.reduced.listed or self.halo.edges)


@dataclass(frozen=True, slots=True)
class AxisRule:
    """What one mesh axis does to an operator: types of inputs -> types of outputs.

    Attributes:
        inputs: type of each tensor input.
        outputs: type of each output.
        letter: the letter that is cut, or None.
    """

    inputs: tuple[AxisType, ...]
    outputs: tuple[AxisType, ...]
    letter: str | None = None

    def __str__(self) -> str:
        return f"{','.join(map(str, self.inputs))}->{','.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Layouts of all inputs and outputs of one operator, and what a rank then computes.

    Attributes:
        inputs: layout of each tensor input.
        outputs: layout of each output.
        sizes: size of each letter on the rank with the largest share.
        collectives: what ranks run inside the operator.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    sizes: Mapping[str, int] = field(compare=False, hash=False)
    collectives: tuple[InnerCollective, ...] = field(default=(), compare=False, hash=False)

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


def axis_rules(rule: OperatorRule, parts: int, chunked: Chunked = ()) -> Iterator[AxisRule]:
    """Everything that one axis of `parts` ranks may do to an operator."""
    num_inputs, num_outputs = len(rule.inputs), len(rule.outputs)
    for same in (I, R):
        yield AxisRule((same,) * num_inputs, (same,) * num_outputs)
    for letter in rule.sizes:
        if rule.can_cut(letter, parts):
            along = (letter, *rule.follows.get(letter, ()))
            cut = _cut_types(rule, dict.fromkeys(along, ()), letter, chunked)
            if cut is not None:
                yield cut
        for chunks in _chunkings(rule, letter, chunked):
            cut = _cut_chunks(rule, letter, chunks, parts, chunked)
            if cut is not None:
                yield cut
    for group in rule.linear:
        inputs = tuple(P if i in group else R for i in range(num_inputs))
        yield AxisRule(inputs, (P,) * num_outputs)


def _chunkings(rule: OperatorRule, letter: str, chunked: Chunked) -> Iterator[tuple[int, ...]]:
    """The chunks of a letter that could be cut."""
    if (
        not chunked
        or letter in rule.ordered
        or (letter in rule.whole and letter not in rule.pieces)
    ):
        return
    tensors = zip((*rule.inputs, *rule.outputs), chunked, strict=True)
    found = {
        t.chunks: None
        for dims, types in tensors
        for t in types
        if letter in dims[t.dim] and _outer(rule, dims[t.dim], letter) == 1
    }
    yield from found


def _cut_chunks(
    rule: OperatorRule, letter: str, chunks: tuple[int, ...], parts: int, chunked: Chunked
) -> AxisRule | None:
    """A cut of the chunks of a letter; None where they or the pieces do not come out even."""
    if rule.sizes[letter] % (sum(chunks) * parts):
        return None
    cut = {letter: chunks}
    if letter in rule.pieces:
        pieces = rule.pieces[letter]
        within = within_pieces(chunks, [size for size, _ in pieces])
        if within is None:
            return None
        cut |= {piece: own for (_, piece), own in zip(pieces, within, strict=True) if piece}
    return _cut_types(rule, cut, letter, chunked)


def _cut_types(
    rule: OperatorRule, cut: Mapping[str, tuple[int, ...]], letter: str, chunked: Chunked
) -> AxisRule | None:
    """What a cut of a letter, and of its pieces, does to each tensor.

    Args:
        rule: the operator's rule.
        cut: chunks of each letter that is cut; () where it is cut as one.
        letter: the letter itself.
        chunked: the types with chunks that there may be.
    """
    contracted = letter in rule.contracted
    lost = P if contracted else I if letter in rule.reduced.over else None
    num_inputs = len(rule.inputs)
    absent = [
        *(P if contracted and i in rule.addends else R for i in range(num_inputs)),
        *(R if i in rule.unaffected else lost for i in range(len(rule.outputs))),
    ]
    types = [
        _cut_type(rule, dims, cut, chunked[i] if chunked else (), absent=absent[i])
        for i, dims in enumerate((*rule.inputs, *rule.outputs))
    ]
    known = tuple(t for t in types if t)
    if len(known) < len(types):
        return None
    return AxisRule(known[:num_inputs], known[num_inputs:], letter)


def _cut_type(
    rule: OperatorRule,
    dims: Dims,
    cut: Mapping[str, tuple[int, ...]],
    chunked: Collection[AxisType],
    *,
    absent: AxisType | None,
) -> AxisType | None:
    """Type of one tensor when letters are cut; None where it may have none."""
    for dim, letters in enumerate(dims):
        for letter in letters:
            if letter in cut:
                chunks, outer = cut[letter], _outer(rule, letters, letter)
                if outer == 1:
                    return S(dim, chunks) if not chunks or S(dim, chunks) in chunked else None
                if chunks or letter in rule.ordered:
                    return None
                # Every slice of an outer letter is a chunk to the inner one.
                fitting = (t for t in chunked if t.dim == dim and t.chunks == (1,) * outer)
                return next(fitting, None)
    return absent


def lone_letters(tensors: Iterable[Dims]) -> frozenset[str]:
    """The letters that are a dim by themselves in every tensor that has them."""
    groups = {letters for dims in tensors for letters in dims}
    merged = {letter for letters in groups if len(letters) > 1 for letter in letters}
    return frozenset(letters[0] for letters in groups if len(letters) == 1) - merged


def _outer(rule: OperatorRule, letters: Sequence[str], letter: str) -> int:
    """How many slices of a dim there are outside of one of its letters."""
    return prod(rule.sizes[x] for x in letters[: letters.index(letter)])


def strategies(
    rule: OperatorRule,
    axis_sizes: tuple[int, ...],
    *,
    partial: Collection[int] | None = None,
    chunked: Chunked = (),
) -> tuple[Strategy, ...]:
    """Every strategy of an operator on a mesh, each combination of layouts once.

    The order in which axes are applied matters only where two of them cut one dim; it then
    is the nesting order of that dim.

    Args:
        rule: the operator's rule.
        axis_sizes: size of each mesh axis.
        partial: inputs that arrive as sums over ranks, if known. Linearity is offered only
            where one of them takes part: making a sum out of whole tensors never pays,
            since the same work on whole tensors needs no reduction afterwards.
        chunked: the types with chunks that the tensors can have.
    """
    if partial is not None:
        linear = tuple(group for group in rule.linear if not group.isdisjoint(partial))
        rule = replace(rule, linear=linear)
    found: dict[Strategy, None] = {}
    for sequence, local in _sequences(_Options(rule, chunked), rule, axis_sizes, ()):
        order = tuple(axis for axis, _ in sequence)
        options = [option for _, option in sorted(sequence, key=lambda pair: pair[0])]
        inputs = _layouts([option.inputs for option in options], len(rule.inputs), order)
        outputs = _layouts([option.outputs for option in options], len(rule.outputs), order)
        cuts = ((axis, option.letter) for axis, option in sequence)
        collectives = rule.collectives(cuts, local.sizes)
        found.setdefault(Strategy(inputs, outputs, local.sizes, collectives))
    return tuple(found)


_Sequence = tuple[tuple[int, AxisRule], ...]


class _Options:
    """What axes may do to the shares of an operator, and the shares that this leaves."""

    def __init__(self, rule: OperatorRule, chunked: Chunked) -> None:
        self.chunked = chunked
        self._letters = tuple(rule.sizes)
        self._known: dict[tuple[int, ...], tuple[tuple[AxisRule, OperatorRule], ...]] = {}

    def of(self, share: OperatorRule, parts: int) -> tuple[tuple[AxisRule, OperatorRule], ...]:
        """Each option of an axis of `parts` ranks, with what it leaves a rank."""
        # Many ways lead to the same share.
        key = (parts, *(share.sizes[letter] for letter in self._letters))
        if key not in self._known:
            self._known[key] = tuple(
                (option, share.cut(option.letter, parts) if option.letter else share)
                for option in axis_rules(share, parts, self.chunked)
            )
        return self._known[key]


def _sequences(
    options: _Options, rule: OperatorRule, axis_sizes: tuple[int, ...], before: _Sequence
) -> Iterator[tuple[_Sequence, OperatorRule]]:
    """Options applied axis by axis; of orders that make no difference only the ascending one."""
    taken = {axis for axis, _ in before}
    if len(taken) == len(axis_sizes):
        yield before, rule
        return
    for axis, parts in enumerate(axis_sizes):
        if axis in taken:
            continue
        for option, local in options.of(rule, parts):
            if before and axis < before[-1][0] and not _share_a_dim(before[-1][1], option):
                continue
            if options.chunked and any(_mix_chunks(earlier, option) for _, earlier in before):
                continue
            yield from _sequences(options, local, axis_sizes, (*before, (axis, option)))


def _share_a_dim(one: AxisRule, other: AxisRule) -> bool:
    if one.letter is None or other.letter is None:
        return False
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    return any(a.is_shard and a == b for a, b in pairs)


def _mix_chunks(one: AxisRule, other: AxisRule) -> bool:
    """Whether they cut one dim of a tensor in different chunks, which no layout does."""
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    return any(a.is_shard and a.dim == b.dim and a.chunks != b.chunks for a, b in pairs)


def _layouts(
    by_axis: Sequence[tuple[AxisType, ...]], num_tensors: int, order: tuple[int, ...]
) -> tuple[Layout, ...]:
    """Layout of each tensor, from its types axis by axis."""
    if not by_axis:
        return (Layout(()),) * num_tensors
    return tuple(_layout(types, order) for types in zip(*by_axis, strict=True))


@cache
def _layout(types: tuple[AxisType, ...], order: tuple[int, ...]) -> Layout:
    return Layout.nested(types, order)
