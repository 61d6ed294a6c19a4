"""Measurements: calibration of a topology, and profiles of a plan."""
