"""Sizes of a program that its export left open."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

Path = tuple[str | int, ...]
"""Where an integer stands in a document: keys and positions from the outside in."""

Terms = tuple[tuple[int, tuple[str, ...]], ...]
"""A sum of products: a coefficient and the symbols that it is multiplied with, each."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """An open size.

    Attributes:
        name: as the export calls it.
        planned: its number in the example inputs.
        least: smallest number that the program is made for.
        most: largest; None where there is no end.
    """

    name: str
    planned: int
    least: int
    most: int | None

    def allows(self, number: int) -> bool:
        """Whether the program is made for a number."""
        return self.least <= number and (self.most is None or number <= self.most)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """The open sizes of a program, and all integers in its document that depend on them.

    Attributes:
        symbols: the open sizes.
        sizes: what the integers at some places are.
    """

    symbols: tuple[Symbol, ...]
    sizes: tuple[tuple[Terms, tuple[Path, ...]], ...]

    @property
    def planned(self) -> dict[str, int]:
        """The number of each symbol in the example inputs."""
        return {symbol.name: symbol.planned for symbol in self.symbols}

    def symbols_of(self, value: str) -> dict[int, str]:
        """The symbols that are sizes of a value themselves, by dim."""
        return {
            path[-1]: names[0]
            for ((factor, names), *more), places in self.sizes
            if factor == 1 and len(names) == 1 and not more
            for path in places
            if path[:-1] == ("values", value, "shape") and isinstance(path[-1], int)
        }

    def resized(self, document: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """The document of the program at other sizes.

        Args:
            document: of the program, as JSON has it; not changed.
            sizes: a number for each symbol.
        """
        changes: dict[str | int, Any] = {}
        for terms, places in self.sizes:
            number = value_of(terms, sizes)
            for path in places:
                branch = changes
                for key in path[:-1]:
                    branch = branch.setdefault(key, {})
                branch[path[-1]] = number
        made: dict[str, Any] = _changed(dict(document), changes)
        made["dynamic"] = self._planned_at(sizes).to_json()
        return made

    def to_json(self) -> dict[str, Any]:
        """The open sizes as plain JSON; `dynamic_from_json` reads them back."""
        return {
            "symbols": [asdict(symbol) for symbol in self.symbols],
            "sizes": [
                {
                    "terms": [[factor, list(names)] for factor, names in terms],
                    "places": [list(path) for path in places],
                }
                for terms, places in self.sizes
            ],
        }

    def _planned_at(self, sizes: Mapping[str, int]) -> "Dynamic":
        symbols = (Symbol(s.name, sizes[s.name], s.least, s.most) for s in self.symbols)
        return Dynamic(tuple(symbols), self.sizes)


def value_of(terms: Terms, sizes: Mapping[str, int]) -> int:
    """The number that a sum of products is."""
    return sum(factor * prod(sizes[name] for name in names) for factor, names in terms)


def _changed(document: Any, changes: Any) -> Any:
    if not isinstance(changes, dict):
        return changes
    made = document.copy()
    for key, change in changes.items():
        made[key] = _changed(document[key], change)
    return made
