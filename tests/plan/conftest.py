import pytest
from support.models import Planner, meta, mlp
from support.planned import planned

from autoshard.plan import Plan

__all__ = ["megatron", "planned"]


@pytest.fixture(scope="session")
def megatron(planned: Planner) -> Plan:
    """A plan with every kind of part: a tensor-parallel MLP with one token."""
    return planned(meta(mlp, 1, 8192, 32768, 8192), (2, 2))
