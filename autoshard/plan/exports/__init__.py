"""Plans for people who keep their own framework: code and settings that place as the plan does.

A target is a function from an `Outline` to text. Nothing here needs torch, and nothing but the
plan is read.
"""

from collections.abc import Callable

from autoshard.errors import OptionError
from autoshard.plan.document import Plan
from autoshard.plan.exports.fsdp2 import to_fsdp2
from autoshard.plan.exports.outline import Outline
from autoshard.plan.exports.tables import to_csv, to_json
from autoshard.plan.exports.tensor_parallel import to_hf_tp_plan, to_parallelize_module
from autoshard.plan.exports.torchtitan import to_torchtitan

EXPORT_TARGETS: dict[str, Callable[[Outline], str]] = {
    "parallelize-module": to_parallelize_module,
    "fsdp2": to_fsdp2,
    "hf-tp-plan": to_hf_tp_plan,
    "torchtitan": to_torchtitan,
    "json": to_json,
    "csv": to_csv,
}


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
    return EXPORT_TARGETS[target](Outline(plan))


__all__ = ["EXPORT_TARGETS", "export_plan"]
