"""The numbers of an export that depend on its dynamic sizes, with values that can be changed.

Every symbolic number in a model.json has an expression and a hint: its value in the example. A
program is read with the hints, so other hints give the program at other sizes. The hints are first
computed from the expressions, since PyTorch leaves those of booleans out.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from autoshard.errors import GraphError, SchemaError, UnsupportedError
from autoshard.graph.json_fields import member, typed
from autoshard.graph.sizes.dynamic_sizes import Condition, LinearSize, Symbol, linear_size, value_of
from autoshard.graph.sizes.expressions import (
    Number,
    Polynomial,
    evaluate,
    expand,
    parsed,
    shortened,
    symbols_in,
    unknown_functions,
)

_BOUNDS = ("min_val", "max_val")
_TAGS: Mapping[str, type[Number]] = {"as_int": int, "as_float": float, "as_bool": bool}
_TABLES = ("sym_int_values", "sym_float_values", "sym_bool_values")
_MARK = 2.0**-30
"""Relative difference between marked numbers."""
_ROUNDING = 1e-12


class SymbolicNumbers:
    """The symbolic numbers of a parsed model.json; changes their hints.

    Args:
        model: the parsed model.json.

    Raises:
        UnsupportedError: an operator gets a number that is computed from a dynamic size by a
            function that is not supported; the message has the function and the line.

    Attributes:
        model: as given.
        symbols: the dynamic sizes.
        integers: value in the example of each dynamic size, and of each integer that is computed
            from them by other functions than sums and products, by its expression.
        floats: value in the example of each floating-point expression.
        booleans: of each boolean expression.
        problem: why other sizes are not supported; empty if nothing is known against them.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.model = model
        self._payloads: dict[str, list[dict[str, Any]]] = defaultdict(list)
        ranges = model.get("range_constraints")
        known = ranges if isinstance(ranges, dict) else {}
        for payload in _expressions(model) if known else ():
            self._payloads[payload["expr_str"]].append(payload)
        self.symbols = tuple(self._find_symbols(known))
        self._planned = {symbol.name: symbol.planned for symbol in self.symbols}
        self.integers: dict[str, int] = dict(self._planned)
        self.floats: dict[str, float] = {}
        self.booleans: dict[str, bool] = {}
        self.problem = ""
        self._polynomials: dict[str, Polynomial] = {}
        self._keys: dict[str, str] = {}  # of expressions that are no integers
        if self.symbols:
            for text in self._payloads:
                self._classify(text)
            self.restore()

    def _find_symbols(self, ranges: Mapping[str, Any]) -> Iterator[Symbol]:
        planned: dict[str, int] = {}
        for text, payloads in self._payloads.items():
            hint = payloads[0].get("hint")
            number = hint.get("as_int") if isinstance(hint, dict) else None
            size = _linear(text) if type(number) is int else None
            if size is not None and type(number) is int:
                planned[size.symbol] = (number - size.offset) // size.factor
        for name, bounds in ranges.items():
            least, most = (bounds.get(b) if isinstance(bounds, dict) else None for b in _BOUNDS)
            if name in planned and type(least) is int and (most is None or type(most) is int):
                yield Symbol(name, planned[name], least, most)

    def _classify(self, text: str) -> None:
        """Note an expression under the type of its values, unless it depends on data."""
        try:
            names = set(symbols_in(text))
            if not names or not names <= self._planned.keys():
                return
            check_functions(text)
            value = self._evaluate(text, self._planned)
            self._check_hint(text, value)
            polynomial = expand(text)
            parts = {name for names in polynomial for name in names} - self.integers.keys()
            made = {name: evaluate(name, self._planned) for name in parts}
        except GraphError as error:
            self._refuse_number(text, str(error))
            self.problem = self.problem or str(error)
            return
        key = shortened(parsed(text))
        if isinstance(value, bool):
            self.booleans[key], self._keys[text] = value, key
        elif isinstance(value, float):
            self.floats[key], self._keys[text] = value, key
        else:
            self._polynomials[text] = polynomial
            self.integers.update((name, int(number)) for name, number in sorted(made.items()))

    def _refuse_number(self, text: str, reason: str) -> None:
        """Raise an error if an operator gets a number, or forward returns it."""
        graph = self._graph()
        for node, scope in _nodes(graph, {}):
            for name, argument in _arguments_of_operators(node):
                if text in _numbers_in(argument, scope):
                    what = f"argument {name!r} of {member(node, 'target', str)}"
                    raise UnsupportedError(not_followed(what, _line(node), reason))
        scope = _scope(graph, {})
        if any(text in _numbers_in(output, scope) for output in member(graph, "outputs", list)):
            raise UnsupportedError(not_followed("a result of forward", "", reason))

    def _graph(self) -> dict[str, Any]:
        return member(member(self.model, "graph_module", dict), "graph", dict)

    def _evaluate(self, text: str, sizes: Mapping[str, int]) -> Number:
        """The value of an expression, in the type of its hint."""
        value, hint = evaluate(text, sizes), self._payloads[text][0].get("hint")
        tag = next(iter(hint), "") if isinstance(hint, dict) else ""
        return _TAGS[tag](value) if tag in _TAGS else value

    def _check_hint(self, text: str, value: Number) -> None:
        """Raise `SchemaError` if the value in the example is not that of the export."""
        hint = self._payloads[text][0].get("hint")
        for known in hint.values() if isinstance(hint, dict) else ():
            if not isinstance(known, int | float) or not isclose(known, value, rel_tol=_ROUNDING):
                raise SchemaError(f"the export says that {text:.80} is {known!r:.80}, not {value}")

    def set_at(self, sizes: Mapping[str, int]) -> None:
        """Set all numbers to their values at given sizes.

        Raises:
            GraphError: one has no value.
        """
        for text in (*self._polynomials, *self._keys):
            self._set(text, self._evaluate(text, sizes))

    def set_samples(self, integers: Mapping[str, int], others: Mapping[str, float | bool]) -> None:
        """Set numbers to values that they need not have together.

        Args:
            integers: value of each of `self.integers`.
            others: values of some of `self.floats` and `self.booleans`; the rest is as planned.
        """
        for text, polynomial in self._polynomials.items():
            terms = tuple((factor, names) for names, factor in polynomial.items())
            self._set(text, value_of(terms, integers))
        known: Mapping[str, Number] = {**self.floats, **self.booleans, **others}
        for text, key in self._keys.items():
            self._set(text, known[key])

    def restore(self) -> None:
        """Set all numbers to their values in the example."""
        self.set_at(self._planned)

    def _set(self, text: str, value: Number) -> None:
        tag = next(tag for tag, kind in _TAGS.items() if kind is type(value))
        for payload in self._payloads[text]:
            payload["hint"] = {tag: value}

    def marks(self) -> dict[str, float]:
        """A value for each of `self.floats` that no other has, and that is close to its own."""
        marks, taken = {}, set(self.floats.values())
        for number, (text, value) in enumerate(self.floats.items(), 1):
            mark = value * (1 + number * _MARK) or number * _MARK
            while mark in taken:
                mark *= 1 + _MARK / 3
            taken.add(mark)
            marks[text] = mark
        return marks

    def assertions(self) -> tuple[Condition, ...]:
        """Conditions on sizes that the program asserts."""
        found = []
        for node, scope in _nodes(self._graph(), {}):
            if member(node, "target", str).endswith(_ASSERTION):
                texts = [text for _, x in _arguments(node) for text in _numbers_in(x, scope)]
                keys = (self._keys.get(text, "") for text in texts)
                found += [Condition(key, key) for key in keys if key in self.booleans]
        return tuple(found)


def check_functions(text: str) -> None:
    """Check that all functions of an expression can be evaluated.

    Raises:
        UnsupportedError: one cannot.
        GraphError: it is no expression.
    """
    unknown = unknown_functions(text)
    if unknown:
        raise UnsupportedError(f"{unknown[0]!r} of sizes is not supported")


def not_followed(what: str, line: str, reason: str) -> str:
    """Message about a number that depends on a dynamic size in a way that is not supported.

    Args:
        what: the number.
        line: file, line and code; empty if unknown.
        reason: why it is not supported.
    """
    return (
        f"{what}{line and f' ({line})'} depends on a dynamic size, and its value at other sizes "
        f"cannot be computed: {reason}. Export with static shapes; or compute it with tensors, as "
        f"in torch.full((), x.shape[0], dtype=x.dtype).log(); or with operators that torch.export "
        f"follows, as in x.shape[0] ** 0.5, x.shape[0] / 3 and x.shape[0] // 2"
    )


_SYMBOLIC = {"as_sym_int", "as_sym_float", "as_sym_bool"}
_ASSERTION = "._assert_scalar.default"
_CHECKS = (_ASSERTION, ".sym_constrain_range_for_size.default", ".sym_constrain_range.default")


def _line(node: Mapping[str, Any]) -> str:
    trace = member(node, "metadata", dict).get("stack_trace")
    return last_line(trace) if isinstance(trace, str) else ""


def last_line(trace: str) -> str:
    """File, line and code of the innermost frame of a stack trace."""
    return " ".join(line.strip() for line in trace.strip().splitlines()[-2:])


def _scope(graph: object, outer: Mapping[str, str]) -> dict[str, str]:
    """Expression of each symbolic number that a graph names."""
    scope = dict(outer)
    for table in _TABLES:
        values = typed(graph, dict, "a graph").get(table) or {}
        for name, value in typed(values, dict, repr(table)).items():
            expression = typed(value, dict, repr(name)).get("as_expr")
            if isinstance(expression, dict):
                scope[name] = member(expression, "expr_str", str)
    return scope


def _nodes(
    graph: object, outer: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, str]]]:
    """All operator calls, also in nested graphs, each with the numbers that its graph names."""
    scope = _scope(graph, outer)
    for node in member(graph, "nodes", list):
        yield node, scope
        for given in member(node, "inputs", list):
            nested = member(given, "arg", dict).get("as_graph")
            if nested is not None:
                yield from _nodes(member(nested, "graph", dict), scope)


def _arguments(node: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and value of each argument of a call."""
    for given in member(node, "inputs", list):
        yield member(given, "name", str), member(given, "arg", dict)


def _arguments_of_operators(node: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments of a call, unless it only computes or checks symbolic numbers."""
    outputs = member(node, "outputs", list)
    computes = all(set(typed(output, dict, "an output")) <= _SYMBOLIC for output in outputs)
    if not computes and not member(node, "target", str).endswith(_CHECKS):
        yield from _arguments(node)


def _numbers_in(argument: object, scope: Mapping[str, str]) -> Iterator[str]:
    """Expressions of the symbolic numbers in an argument, alone or in a list."""
    for payload in typed(argument, dict, "an argument").values():
        for part in payload if isinstance(payload, list) else (payload,):
            name = part.get("as_name") if isinstance(part, dict) else None
            if isinstance(name, str) and name in scope:
                yield scope[name]


def _linear(text: str) -> LinearSize | None:
    try:
        return linear_size(tuple((factor, names) for names, factor in expand(text).items()))
    except GraphError:
        return None


def _expressions(part: object) -> Iterator[dict[str, Any]]:
    """Yield every symbolic number in model.json, but those of memory, on which no plan depends."""
    waiting = [part]
    while waiting:
        current = waiting.pop()
        if isinstance(current, list):
            waiting.extend(current)
        elif isinstance(current, dict):
            expression = current.get("as_expr")
            if isinstance(expression, dict) and isinstance(expression.get("expr_str"), str):
                yield expression
            else:
                waiting.extend(x for key, x in current.items() if key not in _OF_MEMORY)


_OF_MEMORY = frozenset({"storage_offset", "strides"})
