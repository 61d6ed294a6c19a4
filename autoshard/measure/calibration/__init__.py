"""Calibration: measures links and devices of a cluster, and fits a topology to them."""

from autoshard.measure.calibration.calibrate import (
    Calibration,
    Comparison,
    calibrate,
    process_groups,
)
from autoshard.measure.calibration.measurements import (
    FULL,
    QUICK,
    CalibrationEffort,
    CalibrationProgress,
)

__all__ = [
    "FULL",
    "QUICK",
    "Calibration",
    "CalibrationEffort",
    "CalibrationProgress",
    "Comparison",
    "calibrate",
    "process_groups",
]
