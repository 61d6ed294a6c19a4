"""Measuring links and devices on the ranks that a plan will run on."""

from autoshard.runtime.calibration.calibrate import (
    Calibration,
    Comparison,
    calibrate,
    process_groups,
)

__all__ = ["Calibration", "Comparison", "calibrate", "process_groups"]
