"""Calibration: measures links and devices of a cluster, and fits a topology to them."""

from autoshard.runtime.calibration.calibrate import (
    Calibration,
    Comparison,
    calibrate,
    process_groups,
)

__all__ = ["Calibration", "Comparison", "calibrate", "process_groups"]
