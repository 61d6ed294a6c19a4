"""Fixtures of the proofs of rules."""

from collections.abc import Callable, Iterator

import pytest
import torch
from ops.calls import Example, make_example
from ops.simulation import Simulation, prove_rule
from support.expert_operators import registered


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The tensors are tiny: handing them to threads costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _operators_of_experts() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="session")
def example() -> Callable[..., Example]:
    return make_example


@pytest.fixture(scope="session")
def simulation() -> type[Simulation]:
    return Simulation


@pytest.fixture(scope="session")
def prove() -> Callable[..., set[str]]:
    """Proves an example's rule, or the rule given."""
    return prove_rule
