"""Sharding rules per operator family."""

from autoshard.rules.call import Call, call_of
from autoshard.rules.local_kernels import Kernel, LocalKernel, kernel_for
from autoshard.rules.registry import has_rule, is_view, rule_for
from autoshard.rules.rule import AxisRule, Dims, OperatorRule, Strategy, axis_rules, strategies

__all__ = [
    "AxisRule",
    "Call",
    "Dims",
    "Kernel",
    "LocalKernel",
    "OperatorRule",
    "Strategy",
    "axis_rules",
    "call_of",
    "has_rule",
    "is_view",
    "kernel_for",
    "rule_for",
    "strategies",
]
