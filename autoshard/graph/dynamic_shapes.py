"""Dynamic sizes of an export, and how all integers of the program depend on them.

A program is planned at the sizes of its example inputs. To find the dependence on dynamic sizes,
the program is normalised at a few other sizes: every integer that changes is fitted as a polynomial
in the dynamic sizes, which covers anything that was computed from sizes. The fit is validated with
one more sample; if it fails, or if the programs differ in anything but integers, all sizes are
treated as static.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice
from math import prod
from typing import Any

from autoshard.errors import GraphError
from autoshard.graph.checks import MAX_FACTORS
from autoshard.graph.ir import Dynamic, Path, Symbol, Terms, value_of
from autoshard.graph.symbols import evaluate

MAX_SYMBOLS = 6
"""Maximum number of dynamic sizes; the number of samples grows with its square."""

MAX_CALLS = 500_000
"""Maximum number of operator calls in all samples together."""


def find_dynamic(
    model: Mapping[str, Any],
    planned: Callable[[], Mapping[str, Any]],
    read: Callable[[], object],
) -> Dynamic | None:
    """Find the dynamic sizes of a program; None if there are none, or if they are not supported.

    Args:
        model: the parsed model.json; its hints are modified temporarily.
        planned: returns the document of the program at the sizes of the example inputs.
        read: builds the document with the current hints.
    """
    symbols = tuple(_symbols(model))
    if not 0 < len(symbols) <= MAX_SYMBOLS:
        return None
    base = {s.name: s.planned for s in symbols}
    choices = _other_numbers(symbols)
    if not all(len(numbers) == _VALUES_PER_SYMBOL for numbers in choices.values()):
        return None
    groups = _subsets(tuple(base), MAX_FACTORS)
    samples = [base | {name: choices[name][0] for name in group} for group in groups]
    samples.append({name: numbers[1] for name, numbers in choices.items()})
    document = planned()
    if _num_calls(document) * len(samples) > MAX_CALLS:
        return None
    hints = _Hints(model)
    try:
        documents = [document, *(hints.read_at(sizes, read) for sizes in samples[1:])]
    except GraphError:
        return None
    finally:
        hints.restore()
    return _fitted(symbols, groups, samples, documents)


def _num_calls(document: Mapping[str, Any]) -> int:
    return len(document["nodes"]) + len(document.get("preparation", {}).get("nodes", ()))


def _subsets(names: tuple[str, ...], most: int) -> list[tuple[str, ...]]:
    return list(
        chain.from_iterable(combinations(names, n) for n in range(min(most, len(names)) + 1))
    )


def _symbols(model: Mapping[str, Any]) -> Iterator[Symbol]:
    ranges = model.get("range_constraints")
    if not isinstance(ranges, dict) or not ranges:
        return
    planned: dict[str, int] = {}
    for expression in _expressions(model):
        name = _name_of(expression["expr_str"])
        hint = expression["hint"].get("as_int")
        if name is not None and type(hint) is int:
            planned[name] = hint
    for name, bounds in ranges.items():
        least, most = (bounds.get(key) if isinstance(bounds, dict) else None for key in _BOUNDS)
        if name in planned and type(least) is int and (most is None or type(most) is int):
            yield Symbol(name, planned[name], least, most)


def _name_of(text: str) -> str | None:
    """Name of the symbol if an expression is a single symbol, else None."""
    if not text.startswith("Symbol('"):
        return None
    name = text.removeprefix("Symbol('").partition("'")[0]
    return name if text.count("(") == 1 else None


def _expressions(part: object) -> Iterator[dict[str, Any]]:
    """Yield every symbolic size in model.json that has a hint."""
    waiting = [part]
    while waiting:
        current = waiting.pop()
        if isinstance(current, list):
            waiting.extend(current)
        elif isinstance(current, dict):
            expression = current.get("as_expr")
            if isinstance(expression, dict) and isinstance(expression.get("hint"), dict):
                if isinstance(expression.get("expr_str"), str):
                    yield expression
            else:
                waiting.extend(current.values())


def _other_numbers(symbols: Sequence[Symbol]) -> Mapping[str, list[int]]:
    """Two other values for each size, for sampling.

    All values are different and not round, since equal sizes might make different tensors equal.
    """
    used = {symbol.planned for symbol in symbols}
    chosen: dict[str, list[int]] = {}
    for symbol in symbols:
        multiples = (symbol.planned * k + 1 for k in range(2, 2 + _NUM_CANDIDATES))
        near = (symbol.planned + k for k in range(-_NUM_CANDIDATES, _NUM_CANDIDATES))
        free = (n for n in (*multiples, *near) if n > 1 and symbol.allows(n) and n not in used)
        chosen[symbol.name] = list(islice(dict.fromkeys(free), _VALUES_PER_SYMBOL))
        used.update(chosen[symbol.name])
    return chosen


class _Hints:
    """Hints (example values) of the symbolic sizes in a parsed model.json."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._expressions = list(_expressions(model))
        self._original = [expression["hint"] for expression in self._expressions]

    def read_at(self, sizes: Mapping[str, int], read: Callable[[], object]) -> object:
        """Call `read` with the hints set to the values at given sizes of the symbols."""
        for expression, hint in zip(self._expressions, self._original, strict=True):
            if "as_int" in hint:
                expression["hint"] = {"as_int": evaluate(expression["expr_str"], sizes)}
        return read()

    def restore(self) -> None:
        for expression, hint in zip(self._expressions, self._original, strict=True):
            expression["hint"] = hint


def _fitted(
    symbols: tuple[Symbol, ...],
    groups: Sequence[tuple[str, ...]],
    samples: Sequence[Mapping[str, int]],
    documents: Sequence[object],
) -> Dynamic | None:
    """Fit all integers that differ; None if the last sample contradicts the fit."""
    found: dict[Terms, list[Path]] = {}
    try:
        for path, numbers in _differences(documents, ()):
            terms = _terms(groups, samples, numbers)
            if value_of(terms, samples[-1]) != numbers[-1]:
                return None
            found.setdefault(terms, []).append(path)
    except _NotPolynomialError:
        return None
    return Dynamic(symbols, tuple((terms, tuple(places)) for terms, places in found.items()))


class _NotPolynomialError(Exception):
    """Documents differ in more than integers, or no polynomial fits."""


def _differences(documents: Sequence[Any], path: Path) -> Iterator[tuple[Path, Sequence[int]]]:
    first, *others = documents
    kind = type(first)
    if any(type(other) is not kind for other in others):
        raise _NotPolynomialError
    if kind is dict:
        if any(other.keys() != first.keys() for other in others):
            raise _NotPolynomialError
        for key in first:
            yield from _differences([document[key] for document in documents], (*path, key))
    elif kind is list:
        if any(len(other) != len(first) for other in others):
            raise _NotPolynomialError
        for place in range(len(first)):
            yield from _differences([document[place] for document in documents], (*path, place))
    elif any(other != first for other in others):
        if kind is not int:
            raise _NotPolynomialError
        yield path, documents


def _terms(
    groups: Sequence[tuple[str, ...]], samples: Sequence[Mapping[str, int]], numbers: Sequence[int]
) -> Terms:
    """Interpolate the numbers of all samples but the last with a polynomial.

    Newton's divided differences: each symbol has two sampled values, so the polynomial has degree
    one in each symbol, and each coefficient (shifted by the base point) is an alternating sum over
    subsets of symbols.

    Raises:
        _NotPolynomialError: a coefficient is not an integer.
    """
    base, at = samples[0], dict(zip(groups, numbers, strict=False))
    # The sample of a group changes exactly the symbols of the group.
    steps = {
        name: sample[name] - base[name]
        for group, sample in zip(groups, samples, strict=False)
        for name in group
    }
    plain: dict[tuple[str, ...], int] = {}
    for group in groups:
        inside = _subsets(group, len(group))
        change = sum((-1) ** (len(group) - len(part)) * at[part] for part in inside)
        slope, rest = divmod(change, prod(steps[name] for name in group))
        if rest:
            raise _NotPolynomialError
        # (a - a0)(b - b0) = ab - a0 b - b0 a + a0 b0
        for part in inside:
            left = prod(-base[name] for name in group if name not in part)
            plain[part] = plain.get(part, 0) + slope * left
    return tuple((factor, names) for names, factor in plain.items() if factor)


_BOUNDS = ("min_val", "max_val")
_VALUES_PER_SYMBOL = 2
_NUM_CANDIDATES = 8
