"""Functions of torch on what 4 ranks share: results of forward, parameters, gradients."""

from collections.abc import Callable

import pytest
from runtime.cases import functions_of_parameters, functions_of_results, results_in_loops
from support.long_cases import long_of, with_long
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(functions_of_results, functions_of_parameters, results_in_loops)
LONG = long_of(functions_of_results, functions_of_parameters, results_in_loops)


@pytest.mark.matrix(1)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
