"""Applying a plan: parameters sharded, forward replaced, collectives recorded."""

from autoshard.runtime.batches import shard_loader
from autoshard.runtime.checkpoints import dcp_state_dict
from autoshard.runtime.gathering import full_tensor
from autoshard.runtime.parallelize import parallelize
from autoshard.runtime.program import LocalProgram
from autoshard.runtime.recorder import (
    CollectiveRecord,
    CollectiveRecorder,
    record_collectives,
    summarize,
)
from autoshard.runtime.step_counter import RngStep, rng_step
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
    "RngStep",
    "dcp_state_dict",
    "full_tensor",
    "init_empty_weights",
    "load_checkpoint",
    "parallelize",
    "record_collectives",
    "rng_step",
    "save_checkpoint",
    "shard_loader",
    "summarize",
]
