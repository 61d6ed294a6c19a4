"""States of torch that forward may ask for, such as whether gradients are enabled."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from autoshard.graph.export.python_state.description.paths import Key, Path

GRAD_MODE: Path = ("torch:", "is_grad_enabled()")
INFERENCE_MODE: Path = ("torch:", "is_inference_mode_enabled()")
DEFAULT_DTYPE: Path = ("torch:", "get_default_dtype()")

QUERIES: dict[Path, Callable[[], object]] = {
    GRAD_MODE: torch.is_grad_enabled,
    DEFAULT_DTYPE: torch.get_default_dtype,
    INFERENCE_MODE: torch.is_inference_mode_enabled,
    ("torch:", "get_float32_matmul_precision()"): torch.get_float32_matmul_precision,
    ("torch:", "is_anomaly_enabled()"): torch.is_anomaly_enabled,
    ("torch:", "are_deterministic_algorithms_enabled()"): (
        torch.are_deterministic_algorithms_enabled
    ),
}
"""Functions that ask for a state, by their paths."""

CONTEXTS: dict[Path, Callable[[bool], AbstractContextManager[object]]] = {
    GRAD_MODE: torch.set_grad_enabled,
    INFERENCE_MODE: torch.inference_mode,
}
"""Contexts that set some of these states."""


_ENVIRONMENT: Path = ("os:", "environ")


def environment(name: str) -> Path:
    """The path of an environment variable."""
    return (*_ENVIRONMENT, Key(name))


def query_at(path: Path) -> Callable[[], object] | None:
    """The function that asks for the state at a path; None for other paths."""
    if path[:-1] == _ENVIRONMENT and isinstance(path[-1], Key):
        return partial(os.environ.get, str(path[-1].key))
    return QUERIES.get(path)


def query_of(function: object) -> Path | None:
    """The path of a query, if the function is one."""
    return next((path for path, query in QUERIES.items() if query is function), None)
