"""Conformance of the API to its specification."""

from benchmarks.conformance import conform


def test_every_answer_conforms() -> None:
    found = conform(2, phases="examples,fuzzing")
    assert found.status == 0, found.text
    assert found.num_cases >= 40
    selected, total = found.num_operations.split("/")
    assert selected == total
