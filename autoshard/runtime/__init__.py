"""Runs a plan: shards the parameters, replaces forward, loads weights, records collectives."""

from autoshard.runtime.data_loader import shard_loader
from autoshard.runtime.dtensors import dcp_state_dict, full_tensor
from autoshard.runtime.global_tensors.global_tensor import local
from autoshard.runtime.parallelize import parallelize, rng_step
from autoshard.runtime.pipelining import pipeline
from autoshard.runtime.planned_forward import RngStep
from autoshard.runtime.program import LocalProgram
from autoshard.runtime.recorder import (
    CollectiveRecord,
    CollectiveRecorder,
    record_collectives,
    summarize,
)
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
    "local",
    "parallelize",
    "pipeline",
    "record_collectives",
    "rng_step",
    "save_checkpoint",
    "shard_loader",
    "summarize",
]
