"""Applying a plan: parameters sharded, forward replaced, collectives recorded."""

from autoshard.runtime.batches import shard_loader
from autoshard.runtime.checkpoints import dcp_state_dict
from autoshard.runtime.gathering import gathered
from autoshard.runtime.parallelize import parallelize
from autoshard.runtime.program import LocalProgram
from autoshard.runtime.recorder import (
    CollectiveRecord,
    CollectiveRecorder,
    record_collectives,
    summarize,
)
from autoshard.runtime.step_counter import StepCounter, step_counter
from autoshard.runtime.weights import (
    LoadReport,
    init_empty_weights,
    load_checkpoint,
    save_checkpoint,
)

__all__ = [
    "CollectiveRecord",
    "CollectiveRecorder",
    "LoadReport",
    "LocalProgram",
    "StepCounter",
    "dcp_state_dict",
    "gathered",
    "init_empty_weights",
    "load_checkpoint",
    "parallelize",
    "record_collectives",
    "save_checkpoint",
    "shard_loader",
    "step_counter",
    "summarize",
]
