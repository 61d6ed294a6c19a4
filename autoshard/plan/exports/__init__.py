"""Plans for people who keep their own framework: code and settings that place as the plan does.

A target is a function from an `Outline` to text, under `export_target`; every module of this
package is imported here. Nothing here needs torch, and nothing but the plan is read.
"""

from importlib import import_module
from pkgutil import iter_modules

from autoshard.errors import OptionError
from autoshard.plan.document import Plan
from autoshard.plan.exports.outline import Outline
from autoshard.plan.exports.target import EXPORT_TARGETS, ExportTarget

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def export_plan(plan: Plan, target: str) -> str:
    """A plan as code or settings of another framework.

    The text starts with a comment that names what the target cannot express.

    Args:
        plan: with one stage.
        target: a name in `EXPORT_TARGETS`.

    Raises:
        OptionError: there is no such target.
        PlanError: nothing was found, or the target can express nothing of the plan.
    """
    if target not in EXPORT_TARGETS:
        known = ", ".join(EXPORT_TARGETS)
        raise OptionError(f"unknown export target {target!r}; choose one of {known}")
    return EXPORT_TARGETS[target].export(Outline(plan))


__all__ = ["EXPORT_TARGETS", "ExportTarget", "export_plan"]
