"""Loads and saves weights; a rank reads only its own shards."""

from autoshard.checkpoint.loading import LoadReport, load_checkpoint
from autoshard.checkpoint.saving import save_checkpoint
from autoshard.runtime.parameters.model_tensors import init_empty_weights

__all__ = ["LoadReport", "init_empty_weights", "load_checkpoint", "save_checkpoint"]
