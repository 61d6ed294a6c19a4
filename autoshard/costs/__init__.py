"""What operators and parameters cost on one rank: seconds and bytes."""

from autoshard.costs.compute import Category, categorise, operator_times, pace_name
from autoshard.costs.memory import (
    BorderBytes,
    ParameterBytes,
    SavedBytes,
    activation_bytes,
    border_bytes,
    parameter_bytes,
    parse_bytes,
    saved_bytes,
)
from autoshard.costs.optimizer import Optimizer, OptimizerSpec, optimizer_time
from autoshard.costs.overlap import ForwardBackward, Overlap, overlapped_seconds

__all__ = [
    "BorderBytes",
    "Category",
    "ForwardBackward",
    "Optimizer",
    "OptimizerSpec",
    "Overlap",
    "ParameterBytes",
    "SavedBytes",
    "activation_bytes",
    "border_bytes",
    "categorise",
    "operator_times",
    "optimizer_time",
    "overlapped_seconds",
    "pace_name",
    "parameter_bytes",
    "parse_bytes",
    "saved_bytes",
]
