"""Costs of operators and parameters on one rank, in seconds and bytes."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.costs.compute import (
        Category,
        Execution,
        categorise,
        efficiency_key,
        operator_times,
    )
    from autoshard.costs.frequency import GATHERED_ONCE, Frequency
    from autoshard.costs.memory import (
        ParameterBytes,
        SavedBytes,
        activation_bytes,
        halo_bytes,
        parameter_bytes,
        saved_bytes,
    )
    from autoshard.costs.micro_batches import (
        StepCommunication,
        inputs_held,
        most_held,
        num_waiting,
        runs_per_step,
    )
    from autoshard.costs.optimizer import (
        Optimizer,
        OptimizerSpec,
        optimizer_time,
    )
    from autoshard.costs.overlap import (
        ForwardBackward,
        Overlap,
        overlapped_seconds,
    )
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "GATHERED_ONCE",
    "Category",
    "Execution",
    "ForwardBackward",
    "Frequency",
    "Optimizer",
    "OptimizerSpec",
    "Overlap",
    "ParameterBytes",
    "SavedBytes",
    "StepCommunication",
    "activation_bytes",
    "categorise",
    "efficiency_key",
    "halo_bytes",
    "inputs_held",
    "most_held",
    "num_waiting",
    "operator_times",
    "optimizer_time",
    "overlapped_seconds",
    "parameter_bytes",
    "runs_per_step",
    "saved_bytes",
]
