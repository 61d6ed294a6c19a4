"""Calibration: measures links and devices of a cluster, and fits a topology to them."""

from autoshard.measure.calibration.calibrate import (
    Calibration,
    Comparison,
    calibrate,
    process_groups,
)
from autoshard.measure.calibration.measurements import FULL, QUICK, Effort, Progress

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
