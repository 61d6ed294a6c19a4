"""Versions that decide what a plan looks like."""

from importlib.metadata import version

from autoshard.plan import PLAN_VERSION


def versions() -> dict[str, str]:
    """By name, as the service states them."""
    installed = {name: version(name) for name in ("autoshard", "highspy", "numpy")}
    return {**installed, "plan": str(PLAN_VERSION)}
