"""Calibration: measures links and devices of a cluster, and fits a topology to them."""

from autoshard.runtime.calibration.calibrate import (
    Calibration,
    Comparison,
    calibrate,
    process_groups,
)
from autoshard.runtime.calibration.measurements import FULL, QUICK, Effort, Progress

__all__ = [
    "FULL",
    "QUICK",
    "Calibration",
    "Comparison",
    "Effort",
    "Progress",
    "calibrate",
    "process_groups",
]
