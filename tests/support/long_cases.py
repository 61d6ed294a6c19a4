"""Which cases of a file `make test` runs, and which are left to `make test-all`."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import ModuleType

import pytest
from _pytest.mark.structures import ParameterSet


def with_long(cases: Iterable[str], long: Collection[str]) -> list[ParameterSet]:
    """Names of cases as parameters of a test; the long ones are marked so."""
    names = list(cases)
    assert set(long) <= set(names)
    return [pytest.param(n, marks=[pytest.mark.long] if n in long else []) for n in names]


def long_of(*modules: ModuleType) -> set[str]:
    """What is in `LONG` of several modules, under the names that `joined` gives."""
    return {f"{m.__name__.rpartition('.')[2]}: {name}" for m in modules for name in m.LONG}


def all_but_one(names: Iterable[str], variants: Sequence[str]) -> Iterator[str]:
    """Of names that are alike up to a variant at the end, as in "hooks, 2x2", all but one.

    The one that stays is of each variant in turn, so that every name stays, and every variant.
    """
    known = set(names)
    seen = Counter[str]()
    for name in names:
        base, _, variant = name.rpartition(", ")
        alike = [v for v in variants if f"{base}, {v}" in known]
        if variant not in alike or variant != alike[0]:
            continue
        group = base.partition(": ")[0]
        kept = alike[seen[group] % len(alike)]
        seen[group] += 1
        yield from (f"{base}, {v}" for v in alike if v != kept)
