"""Runs plans with several stages, by the schedules of torch.distributed.pipelining."""

from autoshard.runtime.pipelining.model import Pipelined, pipeline

__all__ = ["Pipelined", "pipeline"]
