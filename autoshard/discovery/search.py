"""From trials to a rule: which dims may be cut together, how finely, and what is linear.

Every claim is put to all trials of a call. How finely a dim may be cut follows from cutting it
into more parts, in two sizes: a factor that stays (a number of groups) is the letter, one that
stays inside (pairs of numbers, blocks of 128) is not cut, and otherwise the whole dim is free.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count, islice, product
from math import gcd

import torch

from autoshard.discovery.probe import NotTriableError, Probe
from autoshard.discovery.shapes import FAR, FAR_ELEMENTS
from autoshard.discovery.trial import Option, Trial, Types, axis_types
from autoshard.graph import CallRule, Letters, Tensor
from autoshard.graph.checks import MAX_FREE, MAX_GROUPS
from autoshard.graph.ir import anonymous
from autoshard.layouts import AxisType, I, P, R, S
from autoshard.ops import axis_rules
from autoshard.ops.index_space import given_rule

MAX_COMBINATIONS = 512
"""Combinations of input types that are tried with one dim cut."""

MAX_PARTS = 16
"""Parts into which a dim is cut at most."""

_MAX_LINEAR = 6
"""Floating-point inputs up to which all groups are tried."""

Cuts = tuple[tuple[int, int], ...]
"""The dims that one letter cuts: tensors (inputs, then outputs), and the dim in each."""


class OutOfTimeError(Exception):
    """Trying takes longer than it may."""


@dataclass(frozen=True)
class Cut:
    """One letter of a rule.

    Attributes:
        option: what an axis does that cuts it.
        size: into how many parts it can be cut at most.
    """

    option: Option
    size: int

    @property
    def dims(self) -> Cuts:
        """The dims that it is the outer factor of."""
        types = (*self.option.inputs, *self.option.outputs)
        return tuple((i, t.dim) for i, t in enumerate(types) if t.is_shard)


@dataclass
class Search:
    """The search for the rule of one call.

    Args:
        probe: the small call.
        deadline: when to give up, by `time.monotonic()`.

    Raises:
        NotTriableError: the operator says nothing about itself: its outputs are always 0.
    """

    probe: Probe
    deadline: float
    _known: dict[Types, frozenset[Option]] = field(default_factory=dict)
    _larger: dict[frozenset[int], Probe | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trials = list(_trials(self.probe))
        if len(self._trials) < _FEWEST:
            raise NotTriableError("it gives no finite numbers")
        for outputs in zip(*(trial.outputs for trial in self._trials), strict=True):
            if not any(bool(output.count_nonzero()) for output in outputs):
                raise NotTriableError("it gives zeros whatever goes in")
        self._values = self.probe.draw(self.probe.kinds[0])
        self._outputs = self._trials[0].outputs

    def rule(self) -> CallRule:
        """The rule of the large call.

        Raises:
            OutOfTimeError: there was no time to try everything.
        """
        call = self.probe.call
        cuts: list[Cut] = []
        for i, tensor in enumerate(call.inputs):
            for dim in range(len(tensor.shape)):
                taken = {pair for cut in cuts for pair in cut.dims}
                if (i, dim) not in taken and S(dim) in axis_types(self._values[i]):
                    self._add(cuts, next(self._cuts(i, dim, taken), None))
        return self._assembled(cuts[:MAX_FREE], self._linear())

    def _add(self, cuts: list[Cut], cut: Cut | None) -> None:
        """Take a letter if one rule can say all the letters' options."""
        if cut is not None and self._says([*cuts, cut]):
            cuts.append(cut)

    def _says(self, cuts: Sequence[Cut]) -> bool:
        rule = given_rule(self.probe.call, self._assembled(cuts, linear=()))
        return {cut.option for cut in cuts} <= {
            Option(option.inputs, option.outputs)
            for parts in {_least_factor(cut.size) for cut in cuts}
            for option in axis_rules(rule, parts)
        }

    def _cuts(self, position: int, dim: int, taken: set[tuple[int, int]]) -> Iterator[Cut]:
        """The letters that have this dim, those first that make no sums."""
        for inputs in self._combinations(position, dim):
            for option in sorted(self._options(inputs), key=_preference):
                if I in (*option.inputs, *option.outputs):
                    continue
                cut = Cut(option, self._fineness(option))
                if cut.size > 1 and taken.isdisjoint(cut.dims) and self._holds_far(option):
                    yield cut

    def _combinations(self, position: int, dim: int) -> Iterator[Types]:
        """Types of the inputs with one dim cut: what is related cut too, then not, then sums."""
        shapes = [tensor.shape for tensor in self.probe.call.inputs]
        size = shapes[position][dim]
        cuts: list[list[AxisType]] = []
        for i, value in enumerate(self._values):
            able = [t for t in axis_types(value) if t.is_shard and _related(shapes[i][t.dim], size)]
            able.sort(key=lambda t, shape=shapes[i]: shape[t.dim] != size)  # type: ignore[misc]  # a default
            cuts.append([S(dim)] if i == position else [*able, R])
        sums = [
            types if i == position or P not in axis_types(value) else [*types, P]
            for i, (types, value) in enumerate(zip(cuts, self._values, strict=True))
        ]
        yield from islice(product(*cuts), MAX_COMBINATIONS)
        yield from islice((types for types in product(*sums) if P in types), MAX_COMBINATIONS)

    def _options(self, inputs: Types) -> frozenset[Option]:
        """What holds in all trials with these types of inputs.

        Raises:
            OutOfTimeError: there is no time left.
        """
        if inputs not in self._known:
            self._known[inputs] = _common(self._trials, inputs, self.deadline)
        return self._known[inputs]

    def _fineness(self, option: Option) -> int:
        """Into how many parts the large call can be cut so; 1 where that is not clear."""
        call = self.probe.call
        large = _extent(option, call.inputs, call.outputs)
        small = _extent(option, self._values, self._outputs)
        parts = self._most_parts(self.probe, option, small)
        if self._is_large(option):
            return parts
        inner = large // (small // parts)
        other = self._with_larger(self._cut_sizes(option))
        if other is None:
            return gcd(large, parts, inner)
        values = other.draw(other.kinds[0])
        extent = _extent(option, values, other.run(values))
        more = self._most_parts(other, option, extent)
        found = [parts] if parts == more else []
        found += [inner] if small // parts == extent // more else []
        return gcd(large, *found) if found else 1

    def _holds_far(self, option: Option) -> bool:
        """Whether an option holds nearer to the real sizes too, where that can be tried."""
        sizes = self._cut_sizes(option)
        far = (self.probe.larger(sizes, times=t, limit=FAR_ELEMENTS) for t in FAR)
        other = next((probe for probe in far if probe is not None), None)
        return other is None or self._holds(other, option, 2)

    def _cut_sizes(self, option: Option) -> frozenset[int]:
        """The sizes of the large call's inputs that an option cuts."""
        pairs = zip(self.probe.call.inputs, option.inputs, strict=True)
        return frozenset(tensor.shape[t.dim] for tensor, t in pairs if t.is_shard)

    def _with_larger(self, sizes: frozenset[int]) -> Probe | None:
        if sizes not in self._larger:
            self._larger[sizes] = self.probe.larger(sizes)
        return self._larger[sizes]

    def _is_large(self, option: Option) -> bool:
        """Whether the dims that an option cuts have the sizes of the large call."""
        small = [tuple(value.shape) for value in (*self._values, *self._outputs)]
        call = self.probe.call
        large = [tensor.shape for tensor in (*call.inputs, *call.outputs)]
        types = (*option.inputs, *option.outputs)
        return all(
            not t.is_shard or few[t.dim] == many[t.dim]
            for t, few, many in zip(types, small, large, strict=True)
        )

    def _most_parts(self, probe: Probe, option: Option, extent: int) -> int:
        """The most parts into which a small call can be cut so, as into any factor of them."""
        valid = {1}
        for parts in range(2, min(extent, MAX_PARTS) + 1):
            factors = {d for d in range(1, parts) if parts % d == 0}
            if extent % parts == 0 and factors <= valid and self._holds(probe, option, parts):
                valid.add(parts)
        # All parts that were tried hold: then so does the whole extent.
        tried = {d for d in range(1, min(extent, MAX_PARTS) + 1) if extent % d == 0}
        return extent if valid == tried else max(valid)

    def _holds(self, probe: Probe, option: Option, parts: int) -> bool:
        if time.monotonic() > self.deadline:
            raise OutOfTimeError
        return option in _held(probe.trial(probe.kinds[0], parts=parts), option.inputs)

    def _linear(self) -> tuple[frozenset[int], ...]:
        """Groups of inputs that make a sum of the outputs if they are sums together."""
        able = [i for i, value in enumerate(self._values) if P in axis_types(value)]
        if not all(P in axis_types(output) for output in self._outputs):
            return ()
        most = len(able) if len(able) <= _MAX_LINEAR else 1
        groups = (frozenset(g) for n in range(1, most + 1) for g in combinations(able, n))
        found = (group for group in groups if self._is_linear(group))
        return tuple(islice(found, MAX_GROUPS))

    def _is_linear(self, group: frozenset[int]) -> bool:
        inputs = tuple(P if i in group else R for i in range(len(self._values)))
        option = Option(inputs, (P,) * len(self._outputs))
        return option in self._options(inputs)

    def _assembled(self, cuts: Sequence[Cut], linear: tuple[frozenset[int], ...]) -> CallRule:
        call = self.probe.call
        names = (f"d{i}" for i in count())
        letter_of = {pair: name for cut in cuts for name in [next(names)] for pair in cut.dims}
        sizes = {letter_of[pair]: cut.size for cut in cuts for pair in cut.dims}
        free = frozenset(sizes)
        tensors = (*call.inputs, *call.outputs)
        lettered: list[Letters] = []
        for i, tensor in enumerate(tensors):
            dims: list[tuple[str, ...]] = []
            for dim, size in enumerate(tensor.shape):
                outer = letter_of.get((i, dim))
                inner = size if outer is None else size // sizes[outer]
                letters = () if outer is None else (outer,)
                if inner != 1:
                    name = next(names)
                    sizes[name] = inner
                    letters = (*letters, name)
                dims.append(letters)
            lettered.append(tuple(dims))
        num_inputs = len(call.inputs)
        outputs = [cut.option.outputs for cut in cuts]
        return CallRule(
            operator=call.operator,
            arguments=tuple((name, anonymous(value)) for name, value in call.arguments),
            dtypes=tuple(tensor.dtype for tensor in call.inputs),
            sizes=tuple(sizes.items()),
            inputs=tuple(lettered[:num_inputs]),
            outputs=tuple(lettered[num_inputs:]),
            contracted=frozenset(letter_of[c.dims[0]] for c in cuts if P in c.option.outputs),
            whole=frozenset(sizes) - free,
            linear=linear,
            addends=frozenset(i for cut in cuts for i, t in enumerate(cut.option.inputs) if t is P),
            unaffected=frozenset(i for made in outputs for i, t in enumerate(made) if t is R),
            differentiable=self.probe.differentiable,
        )


def _trials(probe: Probe) -> Iterator[Trial]:
    """The trials that give finite numbers."""
    for kind in probe.kinds:
        try:
            trial = probe.trial(kind)
        except Exception:  # noqa: BLE001, S112  an operator may refuse numbers with any error
            continue
        if all(bool(output.isfinite().any()) for output in trial.outputs if output.numel()):
            yield trial


def _common(trials: Sequence[Trial], inputs: Types, deadline: float) -> frozenset[Option]:
    found: set[Option] | None = None
    for trial in trials:
        if time.monotonic() > deadline:
            raise OutOfTimeError
        held = _held(trial, inputs)
        found = held if found is None else found & held
        if not found:
            break
    return frozenset(found or ())


def _held(trial: Trial, inputs: Types) -> set[Option]:
    try:
        return trial.options(inputs)
    except Exception:  # noqa: BLE001  backward of an operator may raise anything
        return set()


def _extent(
    option: Option,
    inputs: Sequence[torch.Tensor | Tensor],
    outputs: Sequence[torch.Tensor | Tensor],
) -> int:
    """Common factor of the sizes that an option cuts."""
    types = (*option.inputs, *option.outputs)
    tensors = (*inputs, *outputs)
    return gcd(*(t.shape[k.dim] for t, k in zip(tensors, types, strict=True) if k.is_shard))


def _related(one: int, other: int) -> bool:
    """Whether two sizes may be cut together."""
    least, large = sorted((one, other))
    return least > 1 and large % least == 0


def _preference(option: Option) -> tuple[int, int, str]:
    types = (*option.inputs, *option.outputs)
    return types.count(P), option.outputs.count(R), str(option)


def _least_factor(size: int) -> int:
    return next((n for n in range(2, size) if size % n == 0), size)


_FEWEST = 2
"""Trials that must give finite numbers."""
