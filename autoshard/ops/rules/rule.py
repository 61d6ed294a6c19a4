"""Sharding rules of operators, and the strategies that follow from them.

A rule names the operator's iteration space with *index letters*, as einsum does: `x[b,s,k] @
w[n,k] -> y[b,s,n]` has the letters b, s, n, k. The *dims* of a tensor list the letters of each
dim. A dim may be a product of letters, major first: a view from [b*s, h] to [b, s, h] has the
input dims (b s), (h). One mesh axis then has these options:

* all tensors `I`, or all tensors `R`: true of every differentiable operator;
* shard a letter: tensors that have it are `S`, the others `R`. Outputs that lost it to a sum are
  `P`; outputs that lost it to statistics which ranks combine inside the operator are `I`;
* linearity: if the operator is linear in a group of inputs, `P` inputs give `P` outputs.

Example: the rule of the product above, with `contracted={"k"}`, gives on an axis of two ranks

    I,I->I   R,R->R   S(0),R->S(0)   S(1),R->S(1)   R,S(0)->S(2)   S(2),S(1)->P   P,R->P   R,P->P

An axis whose size does not divide a letter may still shard it, into shards of unequal length, if
the letter is a dim of its own in every tensor that has it: two dims that a view merges would be
split at other places than the merged dim.

A strategy chooses one option per axis, from the outermost axis inwards: each axis sees the
operator that the previous axes left.

*Interleaved sub-shards.* A dim may concatenate several things (the fused projection of queries,
keys and values), which a split takes apart and a `cat` joins. Its letter then has *pieces*. A
plain shard would give a rank all of one piece and nothing of another; an interleaved shard gives
it a slice of each. Such types are many and rarely useful, so they are offered only for the
tensors for which the caller lists them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import prod

from autoshard.base.limits import count_made
from autoshard.layouts import (
    AxisType,
    I,
    Layout,
    P,
    R,
    S,
    largest_shard,
    relative_sizes,
    shards_unevenly,
)
from autoshard.ops.rules.collectives import (
    NO_HALO,
    NO_REDUCTIONS,
    Halo,
    InnerCollective,
    Reductions,
    ShardedLetters,
)

Dims = tuple[tuple[str, ...], ...]
"""The letters of each dim of one tensor, major first; () for a dim of size 1."""

Interleaved = Sequence[Collection[AxisType]]
"""The interleaved types that each tensor of a call may have, inputs before outputs; an empty
sequence if no tensor has any."""

Pieces = tuple[tuple[int, str | None], ...]
"""The pieces that a dim concatenates: relative size of each, and the letter of the dim that is
this piece alone, if some tensor has one."""


@dataclass(frozen=True)
class OperatorRule:
    """The sharding rule of one operator call.

    Attributes:
        sizes: size of each letter.
        inputs: letters of each tensor input, in the order of `Node.inputs`.
        outputs: letters of each output.
        contracted: letters that are summed over; sharding one makes the outputs partial.
        whole: letters that must not be sharded.
        linear: groups of inputs (by position) in which the operator is jointly linear, the
            other inputs fixed.
        addends: inputs that are added to a contraction, and so must enter its sum once.
        unaffected: outputs that stay replicated when a letter that they lack is sharded.
        reduced: reductions that ranks run inside the operator when a letter is sharded.
        halo: edges that ranks exchange when a letter is sharded; only one axis may shard such a
            letter, since an axis knows its own neighbours only.
        pieces: pieces of the letters whose dim is a concatenation; such letters have interleaved
            shards only.
        ordered: letters of which a rank must know the global index of its first element, so
            that a shard must be one contiguous range.
        causal: letters of rows and columns, if a row uses the columns up to its own index only
            and the others are not computed.
        uneven: letters that one axis may shard into unequal lengths.
        follows: letters that are sharded together with a letter.
        flops_per_point: floating-point operations per point of the iteration space.
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

    @cached_property
    def outer_letters(self) -> Mapping[str, tuple[str, ...]]:
        """The letters outside of each letter, or of its followers, in dims of tensors."""
        dims = [letters for tensor in (*self.inputs, *self.outputs) for letters in tensor]
        found = {}
        for letter in self.sizes:
            together = (letter, *self.follows.get(letter, ()))
            pairs = ((letters, x) for letters in dims for x in together if x in letters)
            outer = (y for letters, x in pairs for y in letters[: letters.index(x)])
            found[letter] = tuple(dict.fromkeys(outer))
        return found

    def can_shard(self, letter: str, parts: int) -> bool:
        """True if an axis of `parts` ranks may shard a letter into contiguous ranges."""
        size = self.sizes[letter]
        if letter in self.whole or not size:
            return False
        if any(self.sizes[other] % parts for other in self.follows.get(letter, ())):
            return False
        if not self.halo.allows(letter, self.sizes, parts):
            return False
        return size % parts == 0 or (letter in self.uneven and shards_unevenly(size, parts))

    def sharded(self, letter: str, parts: int) -> "OperatorRule":
        """The rule of the largest share that a rank has after an axis sharded a letter.

        Shards of unequal length are not sharded again, nor is a shard split unevenly. A letter
        that was sharded alone no longer follows another one.
        """
        pieces = (piece for _, piece in self.pieces.get(letter, ()) if piece)
        together = (letter, *pieces, *self.follows.get(letter, ()))
        left = frozenset(x for x, others in self.follows.items() if letter in others)
        again = self.sizes[letter] % parts == 0 and letter not in self.halo.edges
        share = copy(self)  # several times faster than `replace`, and keeps cached properties
        vars(share).update(
            sizes={**self.sizes, **{x: largest_shard(self.sizes[x], parts) for x in together}},
            whole=self.whole | left if again else self.whole | left | {letter},
            uneven=self.uneven - {letter},
        )
        return share

    def collectives(
        self, sharded: ShardedLetters, sizes: Mapping[str, int]
    ) -> tuple[InnerCollective, ...]:
        """The collectives that ranks run inside the operator, in order.

        Args:
            sharded: mesh axes with the letter that each shards.
            sizes: letter sizes on a rank, after all axes.
        """
        sharded = tuple(sharded)
        return (
            *self.reduced.collectives(sharded, sizes),
            *self.halo.collectives(sharded, self.sizes, sizes),
        )

    @property
    def communicates(self) -> bool:
        """True if ranks run collectives inside the operator when some letter is sharded."""
        return bool(self.reduced.listed or self.halo.edges)


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One option of a mesh axis: types of the inputs -> types of the outputs.

    Attributes:
        inputs: type of each tensor input.
        outputs: type of each output.
        letter: the letter that is sharded, or None.
    """

    inputs: tuple[AxisType, ...]
    outputs: tuple[AxisType, ...]
    letter: str | None = None

    def __str__(self) -> str:
        return f"{','.join(map(str, self.inputs))}->{','.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Layouts of all inputs and outputs of one operator, and a rank's share of its work.

    Attributes:
        inputs: layout of each tensor input.
        outputs: layout of each output.
        sizes: size of each letter on the rank with the largest share.
        collectives: the collectives that ranks run inside the operator.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    sizes: Mapping[str, int] = field(compare=False, hash=False)
    collectives: tuple[InnerCollective, ...] = field(default=(), compare=False, hash=False)

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


KnownOptions = dict[tuple[str | int, ...], AxisRule | None]
"""Options by the letter that they shard, and the sizes on which the types of tensors depend."""


def axis_rules(
    rule: OperatorRule,
    parts: int,
    interleaved: Interleaved = (),
    *,
    has_gradients: bool = True,
    known: KnownOptions | None = None,
) -> Iterator[AxisRule]:
    """All options of one axis for an operator.

    Args:
        rule: the operator's rule.
        parts: number of ranks of the axis.
        interleaved: the interleaved types that the tensors may have.
        has_gradients: False if no tensor has a gradient, so that `I` stands for `R` too.
        known: options of other shares of the same operator; new ones are added.
    """
    known = {} if known is None else known
    num_inputs, num_outputs = len(rule.inputs), len(rule.outputs)
    for same in (I, R) if has_gradients else (I,):
        yield AxisRule((same,) * num_inputs, (same,) * num_outputs)
    for letter in rule.sizes:
        if rule.can_shard(letter, parts):
            key: tuple[str | int, ...] = (
                letter,
                *(rule.sizes[x] for x in rule.outer_letters[letter]),
            )
            if key not in known:
                together = (letter, *rule.follows.get(letter, ()))
                known[key] = _shard(rule, dict.fromkeys(together, ()), letter, interleaved)
            option = known[key]
            if option is not None:
                yield option
        for sub_shards in _interleavings(rule, letter, interleaved):
            option = _shard_interleaved(rule, letter, sub_shards, parts, interleaved)
            if option is not None:
                yield option
    for group in rule.linear:
        inputs = tuple(P if i in group else R for i in range(num_inputs))
        yield AxisRule(inputs, (P,) * num_outputs)


def _interleavings(
    rule: OperatorRule, letter: str, interleaved: Interleaved
) -> Iterator[tuple[int, ...]]:
    """Relative sub-shard sizes with which a letter might be sharded."""
    if (
        not interleaved
        or letter in rule.ordered
        or (letter in rule.whole and letter not in rule.pieces)
    ):
        return
    tensors = zip((*rule.inputs, *rule.outputs), interleaved, strict=True)
    found = {
        t.sub_shards: None
        for dims, types in tensors
        for t in types
        if letter in dims[t.dim] and _outer(rule, dims[t.dim], letter) == 1
    }
    yield from found


def _shard_interleaved(
    rule: OperatorRule,
    letter: str,
    sub_shards: tuple[int, ...],
    parts: int,
    interleaved: Interleaved,
) -> AxisRule | None:
    """The option with interleaved shards of a letter; None if its sections do not divide."""
    if rule.sizes[letter] % (sum(sub_shards) * parts):
        return None
    sharded = {letter: sub_shards}
    if letter in rule.pieces:
        pieces = rule.pieces[letter]
        within = _sub_shards_within(sub_shards, [size for size, _ in pieces])
        if within is None:
            return None
        sharded |= {piece: own for (_, piece), own in zip(pieces, within, strict=True) if piece}
    return _shard(rule, sharded, letter, interleaved)


def _sub_shards_within(
    sub_shards: Sequence[int], pieces: Sequence[int]
) -> list[tuple[int, ...]] | None:
    """The sub-shards of each piece; None if a section crosses the boundary of a piece."""
    whole, total = sum(pieces), sum(sub_shards)
    ends = [end * whole for end in accumulate(sub_shards)]
    bounds = [0, *(end * total for end in accumulate(pieces))]
    if not set(ends).issuperset(bounds[1:]):
        return None
    return [
        relative_sizes(
            [size for size, end in zip(sub_shards, ends, strict=True) if first < end <= last]
        )
        for first, last in pairwise(bounds)
    ]


def _shard(
    rule: OperatorRule,
    sharded: Mapping[str, tuple[int, ...]],
    letter: str,
    interleaved: Interleaved,
) -> AxisRule | None:
    """The types of all tensors when a letter, its pieces and its followers are sharded.

    Args:
        rule: the operator's rule.
        sharded: sub-shard sizes of each sharded letter; () for a contiguous shard.
        letter: the letter itself.
        interleaved: the interleaved types that tensors may have.
    """
    contracted = letter in rule.contracted
    lost = P if contracted else I if letter in rule.reduced.over else None
    num_inputs = len(rule.inputs)
    absent = [
        *(P if contracted and i in rule.addends else R for i in range(num_inputs)),
        *(R if i in rule.unaffected else lost for i in range(len(rule.outputs))),
    ]
    types = [
        _axis_type(rule, dims, sharded, interleaved[i] if interleaved else (), absent=absent[i])
        for i, dims in enumerate((*rule.inputs, *rule.outputs))
    ]
    known = tuple(t for t in types if t)
    if len(known) < len(types):
        return None
    return AxisRule(known[:num_inputs], known[num_inputs:], letter)


def _axis_type(
    rule: OperatorRule,
    dims: Dims,
    sharded: Mapping[str, tuple[int, ...]],
    interleaved: Collection[AxisType],
    *,
    absent: AxisType | None,
) -> AxisType | None:
    """Type of one tensor when letters are sharded; None if there is no such type.

    Args:
        rule: the operator's rule.
        dims: letters of the tensor.
        sharded: sub-shard sizes of each sharded letter; () for a contiguous shard.
        interleaved: the interleaved types that the tensor may have.
        absent: type of a tensor that has none of the letters.
    """
    for dim, letters in enumerate(dims):
        for letter in letters:
            if letter in sharded:
                sub_shards, outer = sharded[letter], _outer(rule, letters, letter)
                if outer == 1:
                    shard = S(dim, sub_shards)
                    return shard if not sub_shards or shard in interleaved else None
                if sub_shards or letter in rule.ordered:
                    return None
                # Each index of the outer letters is a section of the dim for the inner letter.
                fitting = (t for t in interleaved if t.dim == dim and t.sub_shards == (1,) * outer)
                return next(fitting, None)
    return absent


def lone_letters(tensors: Iterable[Dims]) -> frozenset[str]:
    """The letters that are a dim by themselves in every tensor that has them."""
    groups = {letters for dims in tensors for letters in dims}
    merged = {letter for letters in groups if len(letters) > 1 for letter in letters}
    return frozenset(letters[0] for letters in groups if len(letters) == 1) - merged


def _outer(rule: OperatorRule, letters: Sequence[str], letter: str) -> int:
    """Product of the sizes of the letters outside of one letter of a dim."""
    return prod(rule.sizes[x] for x in letters[: letters.index(letter)])


def strategies(
    rule: OperatorRule,
    axis_sizes: tuple[int, ...],
    *,
    partial: Collection[int] | None = None,
    interleaved: Interleaved = (),
    has_gradients: bool = True,
    allows: Callable[[int, AxisRule], bool] | None = None,
) -> tuple[Strategy, ...]:
    """All strategies of an operator on a mesh, each combination of layouts once.

    The order in which axes are applied matters only if two of them shard one dim; it then is
    the nesting order of that dim.

    Args:
        rule: the operator's rule.
        axis_sizes: size of each mesh axis.
        partial: inputs that may arrive partial, if known. Linearity is offered only for groups
            with one of them: making replicated tensors partial never pays, since the same work
            on replicated tensors needs no reduction afterwards.
        interleaved: the interleaved types that the tensors may have.
        has_gradients: False if no tensor has a gradient; then only one of the strategies that
            differ by `I` and `R` is offered.
        allows: True if an axis may have an option; None if it may have any.
    """
    if partial is not None:
        linear = tuple(group for group in rule.linear if not group.isdisjoint(partial))
        rule = replace(rule, linear=linear)
    found: dict[Strategy, None] = {}
    options_of_axes = _AxisOptions(rule, interleaved, allows, has_gradients=has_gradients)
    for sequence, local in _sequences(options_of_axes, rule, axis_sizes, ()):
        count_made()
        order = tuple(axis for axis, _ in sequence)
        options = [option for _, option in sorted(sequence, key=lambda pair: pair[0])]
        inputs = _layouts([option.inputs for option in options], len(rule.inputs), order)
        outputs = _layouts([option.outputs for option in options], len(rule.outputs), order)
        sharded = ((axis, option.letter) for axis, option in sequence)
        collectives = rule.collectives(sharded, local.sizes)
        found.setdefault(Strategy(inputs, outputs, local.sizes, collectives))
    return tuple(found)


_Sequence = tuple[tuple[int, AxisRule], ...]


class _AxisOptions:
    """The options of axes for the shares of an operator, computed once per share."""

    def __init__(
        self,
        rule: OperatorRule,
        interleaved: Interleaved,
        allows: Callable[[int, AxisRule], bool] | None,
        *,
        has_gradients: bool,
    ) -> None:
        self.interleaved = interleaved
        self._allows = allows
        self._has_gradients = has_gradients
        self._letters = tuple(rule.sizes)
        _ = rule.outer_letters  # the same for all shares, which copy it
        self._options: KnownOptions = {}
        self._known: dict[tuple[int, ...], tuple[tuple[AxisRule, OperatorRule], ...]] = {}

    def of(
        self, share: OperatorRule, axis: int, parts: int
    ) -> tuple[tuple[AxisRule, OperatorRule], ...]:
        """Each option of an axis of `parts` ranks, with the share that it leaves a rank."""
        # Many sequences of options lead to the same share.
        number = 0 if self._allows is None else axis
        key = (number, parts, *(share.sizes[letter] for letter in self._letters))
        if key not in self._known:
            self._known[key] = tuple(
                (option, share.sharded(option.letter, parts) if option.letter else share)
                for option in axis_rules(
                    share,
                    parts,
                    self.interleaved,
                    has_gradients=self._has_gradients,
                    known=self._options,
                )
                if self._allows is None or self._allows(axis, option)
            )
        return self._known[key]


def _sequences(
    options: _AxisOptions, rule: OperatorRule, axis_sizes: tuple[int, ...], before: _Sequence
) -> Iterator[tuple[_Sequence, OperatorRule]]:
    """Options applied axis by axis; of equivalent orders only the ascending one."""
    taken = {axis for axis, _ in before}
    if len(taken) == len(axis_sizes):
        yield before, rule
        return
    for axis, parts in enumerate(axis_sizes):
        if axis in taken:
            continue
        for option, local in options.of(rule, axis, parts):
            count_made(0)
            if before and axis < before[-1][0] and not _share_a_dim(before[-1][1], option):
                continue
            if options.interleaved and any(
                _mix_sub_shards(earlier, option) for _, earlier in before
            ):
                continue
            yield from _sequences(options, local, axis_sizes, (*before, (axis, option)))


def _share_a_dim(one: AxisRule, other: AxisRule) -> bool:
    if one.letter is None or other.letter is None:
        return False
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    return any(a.is_shard and a == b for a, b in pairs)


def _mix_sub_shards(one: AxisRule, other: AxisRule) -> bool:
    """True if two options have different sub-shards of a dim, which no layout can express."""
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    return any(a.is_shard and a.dim == b.dim and a.sub_shards != b.sub_shards for a, b in pairs)


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
