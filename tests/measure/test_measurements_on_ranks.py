"""Profiling and calibration on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import calibration, profiling
from support.models import gpt2, small_graph
from support.ranks import joined

from autoshard.measure.calibration.calibrate import is_checked
from autoshard.measure.calibration.collectives import shared_size
from autoshard.measure.profiling.profile import table_rows
from autoshard.mesh.calibration import CollectiveSample

NUM_RANKS = 4
CASES = joined(profiling, calibration)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)


def test_ids_are_chosen_among_the_rows_of_their_table() -> None:
    graph = small_graph(gpt2)
    ids = {given.name: given.target for given in graph.inputs if given.target == "input_ids"}
    tokens = [node for node in graph.nodes if node.inputs[1:] == tuple(ids)]
    assert [node.operator for node in tokens] == ["aten.embedding.default"]
    rows = graph.values[tokens[0].inputs[0]].shape[0]
    assert rows > 1
    assert table_rows(graph).items() >= dict.fromkeys(ids, rows).items()


def test_sizes_that_three_ranks_cannot_share_are_compared_when_rounded() -> None:
    size, others = 1 << 20, (1 << 22, 1 << 24)
    sample = CollectiveSample("all_gather", 0, 3, shared_size(size, 3), 1.0)
    assert size < sample.nbytes < size + 3 * 3 * 4
    assert is_checked(sample, (size, *others))
    assert not is_checked(sample, others)
