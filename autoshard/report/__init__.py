"""Reports: questions to a plan, answered for people, in words, tables and pictures."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.report.answer import Answer, LayoutRow, answer_of
    from autoshard.report.compare import (
        Change,
        CollectiveChange,
        Figure,
        PlanDifference,
        compare_plans,
    )
    from autoshard.report.coverage import Coverage, OperatorUse, operator_coverage
    from autoshard.report.parameter_rows import ParameterRow, fold_parameters
    from autoshard.report.restriction_cost import restriction_sentences
    from autoshard.report.schedule_view import plan_trace, schedule_svg, schedule_trace
    from autoshard.report.summary import summarise
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "Answer",
    "Change",
    "CollectiveChange",
    "Coverage",
    "Figure",
    "LayoutRow",
    "OperatorUse",
    "ParameterRow",
    "PlanDifference",
    "answer_of",
    "compare_plans",
    "fold_parameters",
    "operator_coverage",
    "plan_trace",
    "restriction_sentences",
    "schedule_svg",
    "schedule_trace",
    "summarise",
]
