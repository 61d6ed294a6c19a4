"""A plan as code or settings of another framework, and what share of it they express."""

from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

from autoshard.base.arguments import Share, check_arguments
from autoshard.errors import OptionError, PlanError
from autoshard.exports import targets
from autoshard.exports.expressed import Expressed, headline, percent
from autoshard.exports.outline import Outline, comment
from autoshard.exports.registry import EXPORT_TARGETS
from autoshard.exports.results import result_sentence
from autoshard.plan.document import Plan
from autoshard.plan.options import MIN_EXPRESSED, ExportableTo
from autoshard.report.page import ExportedText

__all__ = ["EXPORT_TARGETS", "code_exports", "export_plan", "expressed_share"]

for _module in iter_modules(targets.__path__):
    import_module(f"{targets.__name__}.{_module.name}")


@check_arguments
def export_plan(
    plan: Plan, target: str, *, min_expressed: Share = MIN_EXPRESSED, result: Plan | None = None
) -> str:
    """A plan as code or settings for another framework.

    The text starts with a comment that says what share of the plan the target expresses, and what
    it does not express. Tables such as `json` have no such share.

    Args:
        plan: a plan; some targets support one stage only.
        target: a name in `EXPORT_TARGETS`.
        min_expressed: share of the plan, from 0 to 1, that the target must express; see
            `expressed_share`.
        result: the plan that the exported text means to the framework, see
            `autoshard.requests.export_results`; the text then says what it costs and keeps.

    Raises:
        OptionError: there is no such target.
        PlanError: the document has no plan, or the target expresses less of it than
            `min_expressed`.
    """
    outline = _outline(plan, target)
    found = _expressed(outline, target)
    if found is not None and found.share < min_expressed:
        raise PlanError(
            f"{target} would express {found}; that is less than {percent(min_expressed)}. Not "
            f"expressed: {found.missing}. {_WAYS_OUT.get(target, '')}To export it nevertheless, "
            f"set min_expressed=0"
        )
    text = EXPORT_TARGETS[target].export(outline)
    if found is None or result is None:
        return text
    first = comment([headline(found)])
    return first + comment([result_sentence(plan, result)]) + text.removeprefix(first)


def code_exports(plan: Plan) -> tuple[ExportedText, ...]:
    """The plan in the form of every target that is code or settings, or the reason why not.

    Args:
        plan: a plan, not a document without one.
    """
    targets = [name for name, target in EXPORT_TARGETS.items() if target.expresses is not None]
    return tuple(_exported(plan, target) for target in targets)


def _exported(plan: Plan, target: str) -> ExportedText:
    try:
        return ExportedText(target, EXPORT_TARGETS[target].export(_outline(plan, target)))
    except PlanError as error:
        return ExportedText(target, reason=str(error))


def expressed_share(plan: Plan, target: str) -> Expressed | None:
    """The parts of a plan that an export expresses; None if the target is a table of the plan.

    Raises:
        OptionError: there is no such target.
        PlanError: the document has no plan, or the target cannot express any of it.
    """
    return _expressed(_outline(plan, target), target)


_WAYS_OUT = {
    **{
        target: f"Plan again with exportable_to={target!r}, which finds the best plan that it can "
        f"express. "
        for target in get_args(ExportableTo)
    },
    "megatron": "Plan again with algo='megatron', its pattern. ",
}


def _expressed(outline: Outline, target: str) -> Expressed | None:
    measure = EXPORT_TARGETS[target].expresses
    return None if measure is None else measure(outline)


def _outline(plan: Plan, target: str) -> Outline:
    """The view of a plan for a target that can export it."""
    if target not in EXPORT_TARGETS:
        known = ", ".join(EXPORT_TARGETS)
        raise OptionError(f"unknown export target {target!r}; choose one of {known}")
    if len(plan.stages) > 1 and not EXPORT_TARGETS[target].pipelines:
        others = ", ".join(name for name, each in EXPORT_TARGETS.items() if each.pipelines)
        raise PlanError(
            f"the plan has {len(plan.stages)} pipeline stages, which only these exports support: "
            f"{others}"
        )
    return Outline(plan)
