"""The part of the tests that `make test` runs: every behaviour, and a few cases of each matrix."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

_FEW = 2


def sampled(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The tests that `make test` runs.

    They are all without the marks `thorough` and `matrix`, and of each matrix the number of cases
    that its mark has, evenly spaced.
    """
    chosen: set[pytest.Item] = set()
    matrices: dict[tuple[object, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thorough") is not None:
            continue
        if item.get_closest_marker("matrix") is None:
            chosen.add(item)
        else:
            matrices[item.path, getattr(item, "originalname", item.name)].append(item)
    for cases in matrices.values():
        mark = cases[0].get_closest_marker("matrix")
        few = min(mark.args[0] if mark and mark.args else _FEW, len(cases))
        chosen.update(cases[number * len(cases) // few] for number in range(few))
    return chosen
