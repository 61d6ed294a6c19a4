"""Conformance of the API to its specification."""

import pytest

from benchmarks.conformance import conform


@pytest.mark.thorough
def test_every_answer_conforms() -> None:
    found = conform(2, phases="examples,fuzzing")
    assert found.status == 0, found.text
    assert found.num_cases >= 40
    selected, total = found.num_operations.split("/")
    assert selected == total
