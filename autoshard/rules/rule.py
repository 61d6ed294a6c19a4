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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations

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
        flops_per_point: floating-point operations per point of the index space.
    """

    sizes: Mapping[str, int]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    contracted: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
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
    outputs = [
        _cut_type(rule, dims, letter, absent=P if contracted else None) for dims in rule.outputs
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


def strategies(rule: OperatorRule, axis_sizes: tuple[int, ...]) -> tuple[Strategy, ...]:
    """Every strategy of an operator on a mesh, each pair of layouts once.

    The order in which axes are applied matters only where two of them cut one dim; it then
    is the nesting order of that dim.
    """
    found: dict[Strategy, None] = {}
    for order in permutations(range(len(axis_sizes))):
        for chosen, local in _choices(rule, axis_sizes, order):
            by_axis = [chosen[order.index(axis)] for axis in range(len(axis_sizes))]
            inputs = tuple(
                Layout.nested([r.inputs[i] for r in by_axis], order)
                for i in range(len(rule.inputs))
            )
            outputs = tuple(
                Layout.nested([r.outputs[i] for r in by_axis], order)
                for i in range(len(rule.outputs))
            )
            found.setdefault(Strategy(inputs, outputs, local.sizes))
    return tuple(found)


def _choices(
    rule: OperatorRule, axis_sizes: tuple[int, ...], order: tuple[int, ...]
) -> Iterator[tuple[tuple[AxisRule, ...], OperatorRule]]:
    if not order:
        yield (), rule
        return
    parts = axis_sizes[order[0]]
    for option in axis_rules(rule, parts):
        local = rule.cut(option.letter, parts) if option.letter else rule
        for rest, final in _choices(local, axis_sizes, order[1:]):
            yield (option, *rest), final
