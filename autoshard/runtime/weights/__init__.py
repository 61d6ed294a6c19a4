"""Weights from files, and into files: no rank reads or holds what is not its own."""

from autoshard.runtime.weights.loading import LoadReport, load_checkpoint
from autoshard.runtime.weights.meta import parameters_on_meta
from autoshard.runtime.weights.saving import save_checkpoint

__all__ = ["LoadReport", "load_checkpoint", "parameters_on_meta", "save_checkpoint"]
