"""Loads and saves weights; a rank reads only its own shards."""

from autoshard.runtime.model_tensors import init_empty_weights
from autoshard.runtime.weights.loading import LoadReport, load_checkpoint
from autoshard.runtime.weights.saving import save_checkpoint

__all__ = ["LoadReport", "init_empty_weights", "load_checkpoint", "save_checkpoint"]
