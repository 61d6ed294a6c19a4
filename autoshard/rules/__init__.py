"""Sharding rules per operator family."""

from autoshard.rules.rule import AxisRule, Dims, OperatorRule, Strategy, axis_rules, strategies

__all__ = ["AxisRule", "Dims", "OperatorRule", "Strategy", "axis_rules", "strategies"]
