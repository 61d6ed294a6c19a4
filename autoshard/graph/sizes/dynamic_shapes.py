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
from autoshard.graph.sizes.dynamic_sizes import (
    LEAST_SIZE,
    Condition,
    Dynamic,
    Formula,
    Path,
    Symbol,
    Terms,
)
from autoshard.graph.sizes.expressions import MAX_FACTORS, evaluate
from autoshard.graph.sizes.guards import read_conditions
from autoshard.graph.sizes.symbolic_numbers import SymbolicNumbers

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
            expansion of a dim of size 2 to 2; then numbers are not compared.

    Raises:
        _FixedError: they differ.
        GraphError: there is no program of these sizes.
    """
    found = dynamic.replaced(document, dynamic.values_at(sizes))
    try:
        changed = _changes(found, read())
    except (_FixedError, GraphError):
        if may_differ:
            return
        raise
    for path in changed:
        raise _FixedError(f"{_shown(path)} is no polynomial in the dynamic sizes")


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
        by_group = [{}, *map(self._changes_of_group, self._groups[1:])]
        sources = self._sources()
        found: dict[Terms, list[Path]] = {}
        for path in dict.fromkeys(chain(*by_group, sources)):
            if path in sources:
                terms = self._named({(sources[path],): 1})
                if any(path in changes for changes in by_group):
                    raise _FixedError(f"{_shown(path)} depends on sizes and on other numbers")
            else:
                planned = _at(self._document, path)
                numbers = [changes.get(path, planned) for changes in by_group]
                terms = self._named(self._polynomial(path, numbers))
            found.setdefault(terms, []).append(path)
        sizes = tuple((terms, tuple(places)) for terms, places in found.items())
        return sizes, tuple(self._formulas.values())

    def _changes_of_group(self, group: tuple[str, ...]) -> dict[Path, Any]:
        changed = {name: self._base[name] + self._steps[name] for name in group}
        return self._changes(self._base | changed, {})

    def _changes(
        self, integers: Mapping[str, int], others: Mapping[str, float | bool]
    ) -> dict[Path, Any]:
        """The numbers that a sample changes."""
        self._numbers.set_samples(integers, others)
        return _changes(self._document, self._read())

    def _sources(self) -> dict[Path, str]:
        """The expression of each number that is no integer, from marks and flipped booleans.

        Raises:
            _FixedError: a number is computed from one.
        """
        found: dict[Path, str] = {}
        marks = self._numbers.marks()
        by_mark = {mark: text for text, mark in marks.items()}
        for path, mark in self._changes(self._base, marks).items() if marks else ():
            if mark not in by_mark:
                raise _FixedError(f"{_shown(path)} is computed from a number")
            found[path] = by_mark[mark]
        for text, flag in self._numbers.booleans.items():
            for path, flipped in self._changes(self._base, {text: not flag}).items():
                if flipped is flag or type(flipped) is not bool or path in found:
                    raise _FixedError(f"{_shown(path)} is computed from a comparison")
                found[path] = text
        return found

    def _polynomial(self, path: Path, numbers: Sequence[Any]) -> Mapping[tuple[str, ...], int]:
        if any(type(number) is not int for number in numbers):
            raise _FixedError(f"{_shown(path)} depends on sizes in a way that is not known")
        return _interpolated(self._groups, self._steps, self._base, numbers)

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
    """The number that is added to each integer in samples.

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


def _changes(document: Document, other: Document) -> dict[Path, Any]:
    """Numbers of another document that differ from those of a document, by their paths.

    Raises:
        _FixedError: something else differs.
    """
    return dict(_differences(document, other, ()))


def _differences(one: Any, other: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    kind = type(one)
    if type(other) is not kind:
        raise _FixedError(f"{_shown(path)} has another type at other sizes")
    if kind is dict:
        if other.keys() != one.keys():
            raise _FixedError(f"{_shown(path)} has other members at other sizes")
        for key in one:
            yield from _differences(one[key], other[key], (*path, key))
    elif kind is list:
        if len(other) != len(one):
            raise _FixedError(f"{_shown(path)} has another length at other sizes")
        for place, (item, changed) in enumerate(zip(one, other, strict=True)):
            yield from _differences(item, changed, (*path, place))
    elif other != one:
        if kind not in (int, float, bool):
            raise _FixedError(f"{_shown(path)} is another operator or value at other sizes")
        yield path, other


def _at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document


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
