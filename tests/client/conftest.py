"""What all tests of the clients share."""

import logging
from collections.abc import Iterator

import pytest
import structlog
import torch
from support.services import Mlp

from autoshard.graph import export_model


@pytest.fixture(scope="package", autouse=True)
def _quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def graph() -> bytes:
    return export_model(Mlp(), (torch.zeros(8, 16),))
