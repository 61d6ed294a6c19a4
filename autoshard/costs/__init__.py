"""Costs of operators and parameters on one rank, in seconds and bytes."""

from autoshard.costs.compute import Category, categorise, efficiency_key, operator_times
from autoshard.costs.memory import (
    ParameterBytes,
    SavedBytes,
    activation_bytes,
    halo_bytes,
    parameter_bytes,
    parse_bytes,
    saved_bytes,
)
from autoshard.costs.optimizer import Optimizer, OptimizerSpec, optimizer_time
from autoshard.costs.overlap import ForwardBackward, Overlap, overlapped_seconds

__all__ = [
    "Category",
    "ForwardBackward",
    "Optimizer",
    "OptimizerSpec",
    "Overlap",
    "ParameterBytes",
    "SavedBytes",
    "activation_bytes",
    "categorise",
    "efficiency_key",
    "halo_bytes",
    "operator_times",
    "optimizer_time",
    "overlapped_seconds",
    "parameter_bytes",
    "parse_bytes",
    "saved_bytes",
]
