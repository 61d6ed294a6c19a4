"""Search for the sharding rule of an operator call, by trying shardings on small tensors.

An option (types of inputs and outputs on one mesh axis) is accepted if it is valid in all trials of
the call, on an axis of as many ranks as the first prime factor of the dim for which any is. The
number of shards that a dim allows is found by sharding it into more and more parts, in two sizes of
the call. If the number of valid parts is the same in both sizes (a number of
groups), it is the size of the letter. If the size of a valid part is the same (pairs of numbers,
blocks of 128), such parts are not split. Otherwise the whole dim can be sharded freely.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count, islice, product
from math import gcd

import torch

from autoshard.discovery.joined import JoinedDim, joined_dims
from autoshard.discovery.probe import NotTriableError, Probe
from autoshard.discovery.trial import Option, Trial, Types, axis_types
from autoshard.graph import CallRule, Letters, Tensor
from autoshard.graph.checks import MAX_FREE, MAX_GROUPS
from autoshard.graph.ir import anonymous
from autoshard.layouts import AxisType, I, P, R, S
from autoshard.ops import axis_rules
from autoshard.ops.rules.index_space import operator_rule

MAX_COMBINATIONS = 512
"""Maximum combinations of input types that are tried with one dim sharded."""

MAX_PARTS = 16
"""Maximum number of shards that are tried for a dim."""

_PRIMES = tuple(n for n in range(2, MAX_PARTS + 1) if all(n % i for i in range(2, n)))
"""Numbers of ranks for which a dim is tried at first."""

_MAX_LINEAR = 6
"""Maximum number of floating-point inputs for which all groups of them are tried."""

LetterDims = tuple[tuple[int, int], ...]
"""Dims that have a letter, as pairs of tensor index (inputs, then outputs) and dim."""


class OutOfTimeError(Exception):
    """The search exceeded its time limit."""


@dataclass(frozen=True)
class ShardableLetter:
    """An index letter that a mesh axis can shard.

    Attributes:
        option: types of inputs and outputs when the letter is sharded.
        size: size of the letter, which is the maximum number of shards.
    """

    option: Option
    size: int

    @property
    def dims(self) -> LetterDims:
        """Dims whose outer factor is the letter."""
        types = (*self.option.inputs, *self.option.outputs)
        return tuple((i, t.dim) for i, t in enumerate(types) if t.is_shard)


@dataclass
class RuleSearch:
    """Search for the sharding rule of one call.

    Args:
        probe: the small call.
        deadline: value of `time.monotonic()` at which the search stops.

    Raises:
        NotTriableError: the outputs are always 0 or never finite, so nothing can be compared.
    """

    probe: Probe
    deadline: float
    _known_options: dict[tuple[Types, int], frozenset[Option]] = field(default_factory=dict)
    _larger_probes: dict[frozenset[int], Probe | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trials = list(_trials(self.probe))
        if len(self._trials) < _MIN_TRIALS:
            raise NotTriableError("its outputs are not finite")
        for outputs in zip(*(trial.outputs for trial in self._trials), strict=True):
            if not any(bool(output.count_nonzero()) for output in outputs):
                raise NotTriableError("its outputs are always zero")
        self._values = self.probe.draw(self.probe.kinds[0])
        self._outputs = self._trials[0].outputs

    def rule(self) -> CallRule:
        """Return the rule of the original call.

        Raises:
            OutOfTimeError: the deadline passed before the search was complete.
        """
        call = self.probe.call
        letters: list[ShardableLetter] = []
        for i, tensor in enumerate(call.inputs):
            for dim in range(len(tensor.shape)):
                taken = {pair for letter in letters for pair in letter.dims}
                if (i, dim) not in taken:
                    self._add(letters, next(self._letters_with(i, dim, taken), None))
        letters = letters[:MAX_FREE]
        taken = {pair for letter in letters for pair in letter.dims}
        joined = joined_dims(self.probe, self._trials, taken, self._check_time)
        return self._call_rule(letters, self._linear(), [*joined])

    def _add(self, letters: list[ShardableLetter], letter: ShardableLetter | None) -> None:
        """Add a letter if one rule can express the options of all letters."""
        if letter is not None and self._is_expressible([*letters, letter]):
            letters.append(letter)

    def _is_expressible(self, letters: Sequence[ShardableLetter]) -> bool:
        rule = operator_rule(self.probe.call, self._call_rule(letters, linear=()))
        return {letter.option for letter in letters} <= {
            Option(option.inputs, option.outputs)
            for parts in {_least_divisor(letter.size) for letter in letters}
            for option in axis_rules(rule, parts)
        }

    def _letters_with(
        self, position: int, dim: int, taken: set[tuple[int, int]]
    ) -> Iterator[ShardableLetter]:
        """Letters that a dim may have, for each prime factor of its size in turn.

        Those without partial inputs come first.
        """
        values = self._values[position]
        for parts in (n for n in _PRIMES if S(dim) in axis_types(values, n)):
            for inputs in self._combinations(position, dim, parts):
                for option in sorted(self._options(inputs, parts), key=_preference):
                    if I in (*option.inputs, *option.outputs):
                        continue
                    letter = ShardableLetter(option, self._max_parts(option))
                    is_free = letter.size > 1 and taken.isdisjoint(letter.dims)
                    if is_free and self._is_valid_at_larger_sizes(letter, parts):
                        yield letter

    def _combinations(self, position: int, dim: int, parts: int) -> Iterator[Types]:
        """Input types with one dim sharded; related dims sharded first, partial inputs last."""
        shapes = [tensor.shape for tensor in self.probe.call.inputs]
        size = shapes[position][dim]
        choices: list[list[AxisType]] = []
        for i, value in enumerate(self._values):
            candidates = [
                t
                for t in axis_types(value, parts)
                if t.is_shard and _may_shard_together(shapes[i][t.dim], size)
            ]
            candidates.sort(key=lambda t, shape=shapes[i]: shape[t.dim] != size)  # type: ignore[misc]  # a default
            choices.append([S(dim)] if i == position else [*candidates, R])
        sums = [
            types if i == position or P not in axis_types(value) else [*types, P]
            for i, (types, value) in enumerate(zip(choices, self._values, strict=True))
        ]
        yield from islice(product(*choices), MAX_COMBINATIONS)
        yield from islice((types for types in product(*sums) if P in types), MAX_COMBINATIONS)

    def _options(self, inputs: Types, parts: int = 2) -> frozenset[Option]:
        """Options with these input types that are valid in all trials on an axis of `parts` ranks.

        Raises:
            OutOfTimeError: the deadline passed.
        """
        key = inputs, parts
        if key not in self._known_options:
            self._known_options[key] = _options_of_all(self._trials, inputs, parts, self.deadline)
        return self._known_options[key]

    def _max_parts(self, option: Option) -> int:
        """Maximum number of shards in the original call; 1 if it cannot be determined."""
        call = self.probe.call
        large = _common_size(option, call.inputs, call.outputs)
        small = _common_size(option, self._values, self._outputs)
        parts = self._max_valid_parts(self.probe, option, small)
        if self._has_full_size(option):
            return parts
        inner = large // (small // parts)
        other = self._larger_probe(self._sharded_sizes(option))
        if other is None:
            return gcd(large, parts, inner)
        values = other.draw(other.kinds[0])
        size = _common_size(option, values, other.run(values))
        more = self._max_valid_parts(other, option, size)
        found = [parts] if parts == more else []
        found += [inner] if small // parts == size // more else []
        return gcd(large, *found) if found else 1

    def _is_valid_at_larger_sizes(self, letter: ShardableLetter, parts: int) -> bool:
        """True if a letter can be sharded in a larger call too, or if no larger call can run.

        Args:
            letter: the letter.
            parts: number of shards if the larger sizes share no factor with the original ones.
        """
        option = letter.option
        other = self.probe.for_validation(self._sharded_sizes(option))
        if other is None:
            return True
        values = other.draw(other.kinds[0])
        common = gcd(letter.size, _common_size(option, values, other.run(values)))
        return self._is_valid(other, option, _least_divisor(common) if common > 1 else parts)

    def _sharded_sizes(self, option: Option) -> frozenset[int]:
        """Sizes of the dims of the original inputs that an option shards."""
        pairs = zip(self.probe.call.inputs, option.inputs, strict=True)
        return frozenset(tensor.shape[t.dim] for tensor, t in pairs if t.is_shard)

    def _larger_probe(self, sizes: frozenset[int]) -> Probe | None:
        if sizes not in self._larger_probes:
            self._larger_probes[sizes] = self.probe.larger(sizes)
        return self._larger_probes[sizes]

    def _has_full_size(self, option: Option) -> bool:
        """True if the dims that an option shards have the same sizes as in the original call."""
        small = [tuple(value.shape) for value in (*self._values, *self._outputs)]
        call = self.probe.call
        large = [tensor.shape for tensor in (*call.inputs, *call.outputs)]
        types = (*option.inputs, *option.outputs)
        return all(
            not t.is_shard or few[t.dim] == many[t.dim]
            for t, few, many in zip(types, small, large, strict=True)
        )

    def _max_valid_parts(self, probe: Probe, option: Option, size: int) -> int:
        """Maximum number of parts for which an option, and each divisor of the number, is valid."""
        valid = {1}
        for parts in range(2, min(size, MAX_PARTS) + 1):
            factors = {d for d in range(1, parts) if parts % d == 0}
            if size % parts == 0 and factors <= valid and self._is_valid(probe, option, parts):
                valid.add(parts)
        # If all divisors up to MAX_PARTS are valid, the whole dim is assumed to be free.
        tried = {d for d in range(1, min(size, MAX_PARTS) + 1) if size % d == 0}
        return size if valid == tried else max(valid)

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTimeError

    def _is_valid(self, probe: Probe, option: Option, parts: int) -> bool:
        self._check_time()
        return option in probe.trial(probe.kinds[0]).valid_options(option.inputs, parts)

    def _linear(self) -> tuple[frozenset[int], ...]:
        """Groups of inputs in which the operator is jointly linear."""
        candidates = [i for i, value in enumerate(self._values) if P in axis_types(value)]
        if not all(P in axis_types(output) for output in self._outputs):
            return ()
        most = len(candidates) if len(candidates) <= _MAX_LINEAR else 1
        groups = (frozenset(g) for n in range(1, most + 1) for g in combinations(candidates, n))
        found = (group for group in groups if self._is_linear(group))
        return tuple(islice(found, MAX_GROUPS))

    def _is_linear(self, group: frozenset[int]) -> bool:
        inputs = tuple(P if i in group else R for i in range(len(self._values)))
        option = Option(inputs, (P,) * len(self._outputs))
        return option in self._options(inputs)

    def _call_rule(
        self,
        shardable: Sequence[ShardableLetter],
        linear: tuple[frozenset[int], ...],
        joined: Sequence[JoinedDim] = (),
    ) -> CallRule:
        call = self.probe.call
        names = (f"d{i}" for i in count())
        letter_of = {pair: name for x in shardable for name in [next(names)] for pair in x.dims}
        sizes = {letter_of[pair]: x.size for x in shardable for pair in x.dims}
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
        outputs = [x.option.outputs for x in shardable]
        return CallRule(
            operator=call.operator,
            arguments=tuple((name, anonymous(value)) for name, value in call.arguments),
            dtypes=tuple(tensor.dtype for tensor in call.inputs),
            sizes=tuple(sizes.items()),
            inputs=tuple(lettered[:num_inputs]),
            outputs=tuple(lettered[num_inputs:]),
            contracted=frozenset(letter_of[x.dims[0]] for x in shardable if P in x.option.outputs),
            whole=frozenset(sizes) - free,
            linear=linear,
            addends=frozenset(
                i for x in shardable for i, t in enumerate(x.option.inputs) if t is P
            ),
            unaffected=frozenset(i for made in outputs for i, t in enumerate(made) if t is R),
            differentiable=self.probe.differentiable,
            pieces=tuple(
                (
                    lettered[found.place[0]][found.place[1]][0],
                    tuple((size, lettered[i][dim][0]) for size, (i, dim) in found.pieces),
                )
                for found in joined
            ),
        )


def _trials(probe: Probe) -> Iterator[Trial]:
    """Trials whose outputs have finite numbers."""
    for kind in probe.kinds:
        try:
            trial = probe.trial(kind)
        except Exception:  # noqa: BLE001, S112  an operator may refuse numbers with any error
            continue
        if all(bool(output.isfinite().any()) for output in trial.outputs if output.numel()):
            yield trial


def _options_of_all(
    trials: Sequence[Trial], inputs: Types, parts: int, deadline: float
) -> frozenset[Option]:
    found: set[Option] | None = None
    for trial in trials:
        if time.monotonic() > deadline:
            raise OutOfTimeError
        valid = trial.valid_options(inputs, parts)
        found = valid if found is None else found & valid
        if not found:
            break
    return frozenset(found or ())


def _common_size(
    option: Option,
    inputs: Sequence[torch.Tensor | Tensor],
    outputs: Sequence[torch.Tensor | Tensor],
) -> int:
    """Greatest common divisor of the sizes of the dims that an option shards."""
    types = (*option.inputs, *option.outputs)
    tensors = (*inputs, *outputs)
    return gcd(*(t.shape[k.dim] for t, k in zip(tensors, types, strict=True) if k.is_shard))


def _may_shard_together(one: int, other: int) -> bool:
    """True if dims of these sizes may be sharded together: one size divides the other."""
    least, large = sorted((one, other))
    return least > 1 and large % least == 0


def _preference(option: Option) -> tuple[int, int, str]:
    types = (*option.inputs, *option.outputs)
    return types.count(P), option.outputs.count(R), str(option)


def _least_divisor(size: int) -> int:
    return next((n for n in range(2, size) if size % n == 0), size)


_MIN_TRIALS = 2
"""Minimum number of trials with finite outputs."""
