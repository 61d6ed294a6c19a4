"""Sharding rules per operator family."""

from autoshard.ops.aliasing import Strides, made_strides, passes_gradient, view_strides
from autoshard.ops.call import Call, call_of
from autoshard.ops.fused import chunked_types, weights_of
from autoshard.ops.kept import Extra, Saved
from autoshard.ops.local_kernels import Kernel, LocalKernel, kernel_for
from autoshard.ops.reduction import InnerCollective, Operation, Reduction, Reductions
from autoshard.ops.registry import has_rule, is_view, rule_for, with_rules
from autoshard.ops.rule import (
    AxisRule,
    Chunked,
    Dims,
    OperatorRule,
    Strategy,
    axis_rules,
    strategies,
)
from autoshard.ops.saved import has_saved_row, saved_by
from autoshard.ops.working import backward_working

__all__ = [
    "AxisRule",
    "Call",
    "Chunked",
    "Dims",
    "Extra",
    "InnerCollective",
    "Kernel",
    "LocalKernel",
    "Operation",
    "OperatorRule",
    "Reduction",
    "Reductions",
    "Saved",
    "Strategy",
    "Strides",
    "axis_rules",
    "backward_working",
    "call_of",
    "chunked_types",
    "has_rule",
    "has_saved_row",
    "is_view",
    "kernel_for",
    "made_strides",
    "passes_gradient",
    "rule_for",
    "saved_by",
    "strategies",
    "view_strides",
    "weights_of",
    "with_rules",
]
