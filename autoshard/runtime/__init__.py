"""Runs a plan: shards the parameters, replaces forward, loads weights, records collectives."""

from autoshard.runtime.data_loader import shard_loader
from autoshard.runtime.global_tensors.dtensors import dcp_state_dict, full_tensor
from autoshard.runtime.global_tensors.global_tensor import local
from autoshard.runtime.parallelize import parallelize, rng_step
from autoshard.runtime.parameters.model_tensors import init_empty_weights
from autoshard.runtime.pipelining import pipeline
from autoshard.runtime.planned_forward import RngStep
from autoshard.runtime.program.local_program import LocalProgram
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
    "RngStep",
    "dcp_state_dict",
    "full_tensor",
    "init_empty_weights",
    "local",
    "parallelize",
    "pipeline",
    "record_collectives",
    "rng_step",
    "shard_loader",
    "summarize",
]
