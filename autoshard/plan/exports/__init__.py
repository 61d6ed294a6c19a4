"""Exports of a plan: code or settings for other frameworks that place tensors as planned.

A target is a function from an `Outline` to text, registered with `export_target`; all modules of
this package are imported here. Exports read only the plan, and do not need torch.
"""

from importlib import import_module
from pkgutil import iter_modules

from autoshard.errors import OptionError, PlanError
from autoshard.plan.document import Plan
from autoshard.plan.exports.outline import Outline
from autoshard.plan.exports.target import EXPORT_TARGETS, ExportTarget

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def export_plan(plan: Plan, target: str) -> str:
    """A plan as code or settings for another framework.

    The text starts with a comment that lists the parts of the plan that the target cannot express.

    Args:
        plan: a plan; some targets support one stage only.
        target: a name in `EXPORT_TARGETS`.

    Raises:
        OptionError: there is no such target.
        PlanError: the document has no plan, or the target cannot express it.
    """
    if target not in EXPORT_TARGETS:
        known = ", ".join(EXPORT_TARGETS)
        raise OptionError(f"unknown export target {target!r}; choose one of {known}")
    if len(plan.stages) > 1 and not EXPORT_TARGETS[target].pipelines:
        others = ", ".join(name for name, each in EXPORT_TARGETS.items() if each.pipelines)
        raise PlanError(
            f"the plan has {len(plan.stages)} pipeline stages, which only these exports support: "
            f"{others}"
        )
    return EXPORT_TARGETS[target].export(Outline(plan))


__all__ = ["EXPORT_TARGETS", "ExportTarget", "export_plan"]
