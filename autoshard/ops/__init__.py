"""Operators: one `OperatorSpec` each, in one file per family, and their sharding rules."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.ops.interleaved import (
        interleaved_types,
        weights_of,
    )
    from autoshard.ops.registry import (
        backward_workspace,
        draws_random_numbers,
        has_rule,
        is_fusible,
        is_view,
        made_strides,
        may_be_view,
        passes_gradient,
        rule_for,
        saved_tensors,
        saves_less_compiled,
        spec_for,
        view_strides,
        with_rules,
    )
    from autoshard.ops.rules.collectives import (
        InnerCollective,
        LetterReduction,
        Operation,
        Reductions,
    )
    from autoshard.ops.rules.rule import (
        AxisRule,
        Dims,
        Interleaved,
        OperatorRule,
        Strategy,
        axis_rules,
        strategies,
    )
    from autoshard.ops.rules.spec import (
        Call,
        ExtraTensor,
        Kernel,
        OperatorSpec,
        SavedByAutograd,
        call_of,
    )
    from autoshard.ops.rules.strides import Strides
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "AxisRule",
    "Call",
    "Dims",
    "ExtraTensor",
    "InnerCollective",
    "Interleaved",
    "Kernel",
    "LetterReduction",
    "Operation",
    "OperatorRule",
    "OperatorSpec",
    "Reductions",
    "SavedByAutograd",
    "Strategy",
    "Strides",
    "axis_rules",
    "backward_workspace",
    "call_of",
    "draws_random_numbers",
    "has_rule",
    "interleaved_types",
    "is_fusible",
    "is_view",
    "made_strides",
    "may_be_view",
    "passes_gradient",
    "rule_for",
    "saved_tensors",
    "saves_less_compiled",
    "spec_for",
    "strategies",
    "view_strides",
    "weights_of",
    "with_rules",
]
