"""Dynamic sizes of an export, and how all numbers of the program depend on them.

A program is planned at the sizes of its example inputs. To find the dependence on dynamic sizes,
the program is normalised with a few other numbers: every integer that changes is fitted as a
polynomial in the dynamic sizes and in the integers that the export computes from them by other
functions, such as quotients and maxima, each as if it were a size of its own. Floating-point
numbers and booleans are recognised by values that no other number has. So numbers at other sizes
are what the export's own expressions give. Programs at other sizes are compared with what was
found; if one differs, all sizes are fixed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice
from math import prod
from typing import Any

from autoshard.errors import GraphError
from autoshard.graph.dynamic import LEAST_SIZE, Condition, Dynamic, Formula, Path, Symbol, Terms
from autoshard.graph.expressions import MAX_FACTORS, evaluate
from autoshard.graph.guards import read_conditions
from autoshard.graph.symbolic_numbers import SymbolicNumbers

MAX_NAMES = 32
"""Maximum number of dynamic sizes, and integers that are computed from them by other functions
than sums and products; the number of samples grows with its square."""

MAX_CALLS = 500_000
"""Maximum number of operator calls in all samples together."""

Document = Mapping[str, Any]


def find_dynamic(
    numbers: SymbolicNumbers, document: Document, read: Callable[[], Document]
) -> Dynamic | str | None:
    """Find how the numbers of a program depend on its dynamic sizes.

    Args:
        numbers: the symbolic numbers of the export; they are changed, and restored.
        document: the program at the sizes of the example inputs.
        read: reads the program with the current numbers.

    Returns:
        None if there are no dynamic sizes; the reason if they must be those of the example.
    """
    if not numbers.symbols:
        return None
    try:
        return _find(numbers, document, read)
    except (_FixedError, GraphError) as error:
        return str(error)
    finally:
        numbers.restore()


class _FixedError(Exception):
    """The dynamic sizes must be those of the example; the message says why."""


def _find(numbers: SymbolicNumbers, document: Document, read: Callable[[], Document]) -> Dynamic:
    if numbers.problem:
        raise _FixedError(numbers.problem)
    conditions = (*read_conditions(numbers.model), *numbers.assertions())
    planned = {symbol.name: symbol.planned for symbol in numbers.symbols}
    for condition in conditions:
        if not evaluate(condition.expression, planned):
            raise _FixedError(f"{condition.text} is not true of the example")
    others = list(_other_sizes(numbers.symbols, conditions))
    if not others:
        raise _FixedError("the export allows no other sizes")
    groups = _subsets(tuple(numbers.integers), MAX_FACTORS)
    num_samples = len(groups) + 1 + len(numbers.booleans) + len(others)
    num_calls = num_samples * _num_calls(document)
    if len(numbers.integers) > MAX_NAMES or num_calls > MAX_CALLS:
        raise _FixedError("its sizes are computed in too many ways to follow them")
    fit = _Fit(numbers, document, read, groups)
    dynamic = Dynamic(numbers.symbols, *fit.sizes_and_formulas(), conditions)
    for number, sizes in enumerate(others):
        numbers.set_at(sizes)
        _compare(dynamic, document, sizes, read, may_differ=number > 0)
    return dynamic


def _num_calls(document: Document) -> int:
    return len(document["nodes"]) + len(document.get("preparation", {}).get("nodes", ()))


def _subsets(names: tuple[str, ...], most: int) -> list[tuple[str, ...]]:
    return list(
        chain.from_iterable(combinations(names, n) for n in range(min(most, len(names)) + 1))
    )


def _other_sizes(
    symbols: Sequence[Symbol], conditions: Sequence[Condition]
) -> Iterator[dict[str, int]]:
    """Other sizes that the program supports: some large or near ones, then the least."""
    dynamic = Dynamic(tuple(symbols), (), (), tuple(conditions))
    least = {s.name: max(s.least, min(LEAST_SIZE, s.planned)) for s in symbols}
    usual = (sizes for sizes in _candidates(symbols) if sizes not in (least, dynamic.planned))
    yield from islice(filter(dynamic.supports, usual), 1)
    if least != dynamic.planned and dynamic.supports(least):
        yield least


def _candidates(symbols: Sequence[Symbol]) -> Iterator[dict[str, int]]:
    """Sizes that are larger, then any near the planned ones."""
    for factor in (3, 2):
        # Not round, since equal sizes might make different tensors equal.
        yield {s.name: s.planned * factor + i for i, s in enumerate(symbols, 1)}
        yield {s.name: s.planned * factor for s in symbols}
    for step in range(1, _NUM_NEAR):
        yield {s.name: s.planned + step for s in symbols}
        yield {s.name: s.planned - step for s in symbols}
    for changed in symbols:
        for step in range(1, _NUM_NEAR):
            for near in (changed.planned + step, changed.planned - step):
                yield {s.name: near if s is changed else s.planned for s in symbols}


def _compare(
    dynamic: Dynamic,
    document: Document,
    sizes: Mapping[str, int],
    read: Callable[[], Document],
    *,
    may_differ: bool,
) -> None:
    """Compare a program at other sizes with what was found.

    Args:
        dynamic: what was found.
        document: the program at the planned sizes.
        sizes: the other sizes, at which `read` reads the program.
        read: see `find_dynamic`.
        may_differ: True if the program may have other operators at these sizes, such as no
            expansion of a dim of size 1 to 1; then numbers are not compared.

    Raises:
        _FixedError: they differ.
        GraphError: there is no program of these sizes.
    """
    found = dynamic.replaced(document, dynamic.values_at(sizes))
    try:
        differing = next(_differences([read(), found], ()), None)
    except _FixedError:
        if may_differ:
            return
        raise
    if differing is not None:
        raise _FixedError(f"{_shown(differing[0])} is no polynomial in the dynamic sizes")


class _Fit:
    """Fits the numbers of a program by changing symbolic numbers one by one.

    Args:
        numbers: see `find_dynamic`.
        document: see `find_dynamic`.
        read: see `find_dynamic`.
        groups: integers that are changed together; first none, then single ones.
    """

    def __init__(
        self,
        numbers: SymbolicNumbers,
        document: Document,
        read: Callable[[], Document],
        groups: Sequence[tuple[str, ...]],
    ) -> None:
        self._numbers, self._document, self._read = numbers, document, read
        self._groups = groups
        self._base = numbers.integers
        self._steps = _steps(numbers.symbols, numbers.integers)
        self._formulas: dict[str, Formula] = {}

    def sizes_and_formulas(
        self,
    ) -> tuple[tuple[tuple[Terms, tuple[Path, ...]], ...], tuple[Formula, ...]]:
        """The members of `Dynamic`."""
        marks = self._numbers.marks()
        flags = list(self._numbers.booleans)
        sources: dict[tuple[int, object], str] = {
            (len(self._groups), mark): text for text, mark in marks.items()
        }
        marked = [self._sample(self._base, marks)] if marks else []
        for text in flags:
            value = not self._numbers.booleans[text]
            sources[len(self._groups) + len(marked), value] = text
            marked.append(self._sample(self._base, {text: value}))
        documents = [self._document, *map(self._group, self._groups[1:]), *marked]
        found: dict[Terms, list[Path]] = {}
        for path, numbers in _differences(documents, ()):
            found.setdefault(self._terms(path, numbers, sources), []).append(path)
        sizes = tuple((terms, tuple(places)) for terms, places in found.items())
        return sizes, tuple(self._formulas.values())

    def _group(self, group: tuple[str, ...]) -> Document:
        changed = {name: self._base[name] + self._steps[name] for name in group}
        return self._sample(self._base | changed, {})

    def _sample(self, integers: Mapping[str, int], others: Mapping[str, float | bool]) -> Document:
        self._numbers.set_samples(integers, others)
        return self._read()

    def _terms(
        self, path: Path, numbers: Sequence[Any], sources: Mapping[tuple[int, object], str]
    ) -> Terms:
        """What a number depends on.

        Raises:
            _FixedError: it is neither a polynomial nor one of the export's own numbers.
        """
        count, first = len(self._groups), numbers[0]
        if type(first) is int and all(number == first for number in numbers[count:]):
            return self._named(_interpolated(self._groups, self._steps, self._base, numbers))
        changed = [place for place, number in enumerate(numbers) if number != first]
        source = sources.get((changed[0], numbers[changed[0]]))
        if len(changed) > 1 or source is None:
            raise _FixedError(f"{_shown(path)} depends on sizes in a way that is not known")
        return self._named({(source,): 1})

    def _named(self, polynomial: Mapping[tuple[str, ...], int]) -> Terms:
        return tuple(
            (factor, tuple(map(self._name, names))) for names, factor in polynomial.items()
        )

    def _name(self, name: str) -> str:
        """The name of a symbol, or of the formula of an expression."""
        if any(symbol.name == name for symbol in self._numbers.symbols):
            return name
        formula = Formula(f"number_{len(self._formulas)}", name)
        return self._formulas.setdefault(name, formula).name


def _steps(symbols: Sequence[Symbol], base: Mapping[str, int]) -> dict[str, int]:
    """What is added to each integer in samples.

    All values are different and not round, since equal sizes might make different tensors equal.
    """
    used = set(base.values())
    allowed = {symbol.name: symbol for symbol in symbols}
    steps = {}
    for name, value in base.items():
        multiples = (value * k + 1 for k in range(2, 2 + _NUM_NEAR) if name in allowed)
        near = chain.from_iterable((value + k, value - k) for k in range(1, _NUM_NEAR + len(base)))
        free = [n for n in (*multiples, *near) if n not in used]
        symbol = allowed.get(name)
        best = [n for n in free if symbol is None or (n > 1 and symbol.allows(n))]
        chosen = (best or free)[0]
        used.add(chosen)
        steps[name] = chosen - value
    return steps


def _differences(documents: Sequence[Any], path: Path) -> Iterator[tuple[Path, Sequence[Any]]]:
    """The paths at which numbers of documents differ.

    Raises:
        _FixedError: something else differs.
    """
    first, *others = documents
    kind = type(first)
    if any(type(other) is not kind for other in others):
        raise _FixedError(f"{_shown(path)} has other types at other sizes")
    if kind is dict:
        if any(other.keys() != first.keys() for other in others):
            raise _FixedError(f"{_shown(path)} has other members at other sizes")
        for key in first:
            yield from _differences([document[key] for document in documents], (*path, key))
    elif kind is list:
        if any(len(other) != len(first) for other in others):
            raise _FixedError(f"{_shown(path)} has another length at other sizes")
        for place in range(len(first)):
            yield from _differences([document[place] for document in documents], (*path, place))
    elif any(other != first for other in others):
        if kind not in (int, float, bool):
            raise _FixedError(f"{_shown(path)} is another operator or value at other sizes")
        yield path, documents


def _shown(path: Path) -> str:
    return ".".join(map(str, path)) or "the program"


def _interpolated(
    groups: Sequence[tuple[str, ...]],
    steps: Mapping[str, int],
    base: Mapping[str, int],
    numbers: Sequence[int],
) -> dict[tuple[str, ...], int]:
    """Interpolate the numbers of the samples of all groups with a polynomial.

    Newton's divided differences: each name has two sampled values, so the polynomial has degree
    one in each, and each coefficient (shifted by the base point) is an alternating sum over subsets
    of names.

    Raises:
        _FixedError: a coefficient is not an integer.
    """
    at = dict(zip(groups, numbers, strict=False))
    plain: dict[tuple[str, ...], int] = {}
    for group in groups:
        inside = _subsets(group, len(group))
        change = sum((-1) ** (len(group) - len(part)) * at[part] for part in inside)
        slope, rest = divmod(change, prod(steps[name] for name in group))
        if rest:
            raise _FixedError("an integer is no polynomial in the dynamic sizes")
        # (a - a0)(b - b0) = ab - a0 b - b0 a + a0 b0
        for part in inside:
            left = prod(-base[name] for name in group if name not in part)
            plain[part] = plain.get(part, 0) + slope * left
    return {names: factor for names, factor in plain.items() if factor}


_NUM_NEAR = 9
