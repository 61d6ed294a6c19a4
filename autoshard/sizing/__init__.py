"""Sizing: whether a model fits some devices, what takes their memory, and how many it needs."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.sizing.devices import size_model
    from autoshard.sizing.fit import fit_model
    from autoshard.sizing.largest import find_largest
    from autoshard.sizing.results import DeviceCount, Fit, FitRow, HeldMemory, Largest, Size
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "DeviceCount",
    "Fit",
    "FitRow",
    "HeldMemory",
    "Largest",
    "Size",
    "find_largest",
    "fit_model",
    "size_model",
]
