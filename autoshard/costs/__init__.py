"""What operators and parameters cost on one rank: seconds and bytes."""

from autoshard.costs.compute import Category, categorise, operator_times
from autoshard.costs.memory import (
    ParameterBytes,
    SavedBytes,
    activation_bytes,
    parameter_bytes,
    parse_bytes,
    saved_bytes,
)
from autoshard.costs.optimizer import Optimizer, OptimizerSpec, optimizer_time

__all__ = [
    "Category",
    "Optimizer",
    "OptimizerSpec",
    "ParameterBytes",
    "SavedBytes",
    "activation_bytes",
    "categorise",
    "operator_times",
    "optimizer_time",
    "parameter_bytes",
    "parse_bytes",
    "saved_bytes",
]
