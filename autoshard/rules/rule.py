"""What an operator may do on a mesh: its rule, and the strategies that follow from it.

A rule names the operator's index space with letters, as einsum does. `x[b,s,k] @ w[n,k]`
has the letters b, s, n, k. A dim of a tensor is a product of letters, major first: a view
from [b*s, h] to [b, s, h] has the input dims (b s), (h). What one mesh axis may do follows:

* everything `I`, or everything `R`: true of every differentiable operator;
* cut a letter: tensors that have it are `S`, the others `R`; outputs that lost it to a sum
  are `P`;
* linearity: where the operator is linear in a group of inputs, `P` in gives `P` out.

A strategy is one such option per axis, applied from the outermost axis inwards: the next
axis sees the operator that the previous ones left.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from autoshard.layouts import AxisType, I, Layout, P, R, S

Dims = tuple[tuple[str, ...], ...]
"""The letters of each dim of one tensor, major first; () for a dim of size 1."""


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
    flops_per_point: float = 0.0

    def cut(self, letter: str, parts: int) -> "OperatorRule":
        """The rule of one rank's share after a letter was cut into equal parts."""
        sizes = {**self.sizes, letter: self.sizes[letter] // parts}
        return replace(self, sizes=sizes)


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
        sizes: size of each letter on one rank.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    sizes: Mapping[str, int] = field(compare=False, hash=False)

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


def axis_rules(rule: OperatorRule, parts: int) -> Iterator[AxisRule]:
    """Everything that one axis of `parts` ranks may do to an operator."""
    num_inputs, num_outputs = len(rule.inputs), len(rule.outputs)
    for same in (I, R):
        yield AxisRule((same,) * num_inputs, (same,) * num_outputs)
    for letter, size in rule.sizes.items():
        if letter not in rule.whole and size and size % parts == 0:
            cut = _cut_types(rule, letter)
            if cut is not None:
                yield cut
    for group in rule.linear:
        inputs = tuple(P if i in group else R for i in range(num_inputs))
        yield AxisRule(inputs, (P,) * num_outputs)


def _cut_types(rule: OperatorRule, letter: str) -> AxisRule | None:
    contracted = letter in rule.contracted
    inputs = [
        _cut_type(rule, dims, letter, absent=P if contracted and i in rule.addends else R)
        for i, dims in enumerate(rule.inputs)
    ]
    lost = P if contracted else None
    outputs = [
        _cut_type(rule, dims, letter, absent=R if i in rule.unaffected else lost)
        for i, dims in enumerate(rule.outputs)
    ]
    if None in inputs or None in outputs:
        return None
    return AxisRule(tuple(t for t in inputs if t), tuple(t for t in outputs if t), letter)


def _cut_type(
    rule: OperatorRule, dims: Dims, letter: str, *, absent: AxisType | None
) -> AxisType | None:
    """Type of one tensor when a letter is cut; None where the cut would not be a slice."""
    for dim, letters in enumerate(dims):
        if letter in letters:
            outer = letters[: letters.index(letter)]
            return S(dim) if all(rule.sizes[o] == 1 for o in outer) else None
    return absent


def strategies(
    rule: OperatorRule,
    axis_sizes: tuple[int, ...],
    *,
    partial: Collection[int] | None = None,
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
    """
    if partial is not None:
        linear = tuple(group for group in rule.linear if not group.isdisjoint(partial))
        rule = replace(rule, linear=linear)
    found: dict[Strategy, None] = {}
    for sequence, local in _sequences(_Options(rule), rule, axis_sizes, ()):
        order = tuple(axis for axis, _ in sequence)
        options = [option for _, option in sorted(sequence, key=lambda pair: pair[0])]
        inputs = _layouts([option.inputs for option in options], len(rule.inputs), order)
        outputs = _layouts([option.outputs for option in options], len(rule.outputs), order)
        found.setdefault(Strategy(inputs, outputs, local.sizes))
    return tuple(found)


_Sequence = tuple[tuple[int, AxisRule], ...]


class _Options:
    """What axes may do to the shares of an operator, and the shares that this leaves."""

    def __init__(self, rule: OperatorRule) -> None:
        self._letters = tuple(rule.sizes)
        self._known: dict[tuple[int, ...], tuple[tuple[AxisRule, OperatorRule], ...]] = {}

    def of(self, share: OperatorRule, parts: int) -> tuple[tuple[AxisRule, OperatorRule], ...]:
        """Each option of an axis of `parts` ranks, with what it leaves a rank."""
        # Many ways lead to the same share.
        key = (parts, *(share.sizes[letter] for letter in self._letters))
        if key not in self._known:
            self._known[key] = tuple(
                (option, share.cut(option.letter, parts) if option.letter else share)
                for option in axis_rules(share, parts)
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
            yield from _sequences(options, local, axis_sizes, (*before, (axis, option)))


def _share_a_dim(one: AxisRule, other: AxisRule) -> bool:
    if one.letter is None or other.letter is None:
        return False
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    return any(a.is_shard and a == b for a, b in pairs)


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
