"""Dynamic sizes of a program, and all numbers in its document that depend on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from pydantic import ConfigDict

from autoshard.errors import GraphError
from autoshard.graph.sizes.expressions import Number, evaluate

Path = tuple[str | int, ...]
"""Path of a number in a JSON document: keys and indices, outermost first."""

Terms = tuple[tuple[int, tuple[str, ...]], ...]
"""A polynomial: (coefficient, names of the factors) for each term."""

LEAST_SIZE = 2
"""The least size that PyTorch does not treat as special, as in broadcasting."""

MAX_CONDITIONS = 4096
"""Maximum number of conditions of a program."""

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dynamic size.

    Attributes:
        name: name of the symbol in the export.
        planned: its value in the example inputs.
        least: minimum value that the program supports.
        most: maximum value; None if unbounded.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    planned: int
    least: int
    most: int | None

    def allows(self, number: int) -> bool:
        """True if the program supports a value of the size."""
        return self.least <= number and (self.most is None or number <= self.most)


@dataclass(frozen=True, slots=True)
class Formula:
    """A number that depends on dynamic sizes, and is no polynomial of them.

    Attributes:
        name: unique among formulas and symbols.
        expression: see `autoshard.graph.sizes.expressions`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on dynamic sizes under which the exported program computes what the model does.

    Attributes:
        expression: see `autoshard.graph.sizes.expressions`.
        text: the condition in the words of the export, for messages.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    expression: str
    text: str


@dataclass(frozen=True, slots=True)
class LinearSize:
    """A size that is a multiple of a symbol, plus a number.

    Attributes:
        symbol: name of the symbol.
        factor: what it is multiplied by, positive.
        offset: what is added.
    """

    symbol: str
    factor: int = 1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Dynamic sizes of a program, and all numbers in its document that depend on them.

    Attributes:
        symbols: the dynamic sizes.
        sizes: polynomials in symbols and formulas, each with the paths of the numbers that it
            determines. One that is a formula alone may be a floating-point number or a boolean.
        formulas: numbers that are no polynomials in symbols.
        conditions: what must be true of other sizes than planned.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    symbols: tuple[Symbol, ...]
    sizes: tuple[tuple[Terms, tuple[Path, ...]], ...]
    formulas: tuple[Formula, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @property
    def planned(self) -> dict[str, int]:
        """Value of each symbol in the example inputs."""
        return {symbol.name: symbol.planned for symbol in self.symbols}

    def sizes_of(self, value: str) -> dict[int, LinearSize]:
        """Map each dim of a value whose size tells the value of a symbol to how it does."""
        names = self.planned
        return {
            path[-1]: linear
            for terms, places in self.sizes
            if (linear := linear_size(terms)) is not None and linear.symbol in names
            for path in places
            if path[:-1] == ("values", value, "shape") and isinstance(path[-1], int)
        }

    def symbols_of(self, value: str) -> dict[int, str]:
        """Map each dim of a value whose size is a symbol to the symbol."""
        sizes = self.sizes_of(value).items()
        return {dim: size.symbol for dim, size in sizes if size == LinearSize(size.symbol)}

    def values_at(self, sizes: Mapping[str, int]) -> dict[str, Number]:
        """Values of all symbols and formulas, given those of the symbols.

        Raises:
            GraphError: a formula has no value at these sizes.
        """
        return {**sizes, **{f.name: evaluate(f.expression, sizes) for f in self.formulas}}

    def check(self, sizes: Mapping[str, int]) -> None:
        """Check that the exported program computes what the model does at some sizes.

        Args:
            sizes: value of each symbol.

        Raises:
            GraphError: it does not; the message has the range or the condition.
        """
        for symbol in self.symbols:
            if not symbol.allows(sizes[symbol.name]):
                raise GraphError(
                    f"size {symbol.name!r} was exported for {symbol.least} to {symbol.most}, not "
                    f"{sizes[symbol.name]}; export again with a wider torch.export.Dim"
                )
        for condition in self.conditions:
            if not evaluate(condition.expression, sizes):
                raise GraphError(
                    f"the model was exported for sizes with {condition.text}, which is not true of "
                    f"these, and it may compute something else for them: export it with an example "
                    f"of such sizes"
                )

    def check_special(self, sizes: Mapping[str, int]) -> None:
        """Check that no size is 0 or 1 that was larger in the example.

        Exports take for granted that it is not, without a condition: where forward asks for it
        (`if x.shape[0] == 1`), they have the other branch alone.

        Raises:
            GraphError: one is.
        """
        for symbol in self.symbols:
            if sizes.get(symbol.name, LEAST_SIZE) < LEAST_SIZE <= symbol.planned:
                raise GraphError(
                    f"a size of {sizes[symbol.name]} is a special case in PyTorch, which an export "
                    f"with a larger example does not have"
                )

    def supports(self, sizes: Mapping[str, int]) -> bool:
        """True if the exported program computes what the model does at some sizes."""
        try:
            self.check(sizes)
        except GraphError:
            return False
        return True

    def resized(self, document: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the JSON document of the program at other sizes.

        Args:
            document: JSON document of the program; not modified.
            sizes: value of each symbol.

        Raises:
            GraphError: a number has no value at these sizes.
        """
        made = self.replaced(document, self.values_at(sizes))
        symbols = [
            {**symbol, "planned": sizes[symbol["name"]]}
            for symbol in document["dynamic"]["symbols"]
        ]
        made["dynamic"] = {**document["dynamic"], "symbols": symbols}
        return made

    def replaced(self, document: Mapping[str, Any], values: Mapping[str, Number]) -> dict[str, Any]:
        """Return a document with other numbers, given the values of symbols and formulas."""
        changes: dict[str | int, Any] = {}
        for terms, places in self.sizes:
            number = value_of(terms, values)
            for path in places:
                branch = changes
                for key in path[:-1]:
                    branch = branch.setdefault(key, {})
                branch[path[-1]] = number
        made: dict[str, Any] = _changed(dict(document), changes)
        return made


def value_of(terms: Terms, values: Mapping[str, Number]) -> Number:
    """Evaluate a polynomial; a name alone keeps its type."""
    match terms:
        case ((1, (name,)),):
            return values[name]
    return sum(factor * prod(values[name] for name in names) for factor, names in terms)


def linear_size(terms: Terms) -> LinearSize | None:
    """A polynomial as a multiple of one name, plus a number; None if it is something else."""
    offset = sum(factor for factor, names in terms if not names)
    match [term for term in terms if term[1]]:
        case [(factor, (name,))] if factor > 0:
            return LinearSize(name, factor, offset)
    return None


def _changed(document: Any, changes: Any) -> Any:
    if not isinstance(changes, dict):
        return changes
    made = document.copy()
    for key, change in changes.items():
        made[key] = _changed(document[key], change)
    return made
