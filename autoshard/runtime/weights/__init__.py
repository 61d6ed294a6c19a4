"""Weights from files, and into files: no rank reads or holds what is not its own."""

from autoshard.runtime.weights.loading import LoadReport, load_checkpoint
from autoshard.runtime.weights.meta import init_empty_weights
from autoshard.runtime.weights.saving import save_checkpoint

__all__ = ["LoadReport", "init_empty_weights", "load_checkpoint", "save_checkpoint"]
