"""Applying a plan: parameters sharded, forward replaced, collectives recorded."""

from autoshard.runtime.checkpoints import checkpointable
from autoshard.runtime.parallelize import parallelize
from autoshard.runtime.program import LocalProgram
from autoshard.runtime.recorder import (
    CollectiveRecord,
    CollectiveRecorder,
    record_collectives,
    summarize,
)

__all__ = [
    "CollectiveRecord",
    "CollectiveRecorder",
    "LocalProgram",
    "checkpointable",
    "parallelize",
    "record_collectives",
    "summarize",
]
