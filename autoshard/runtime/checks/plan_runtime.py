"""Check of a plan before it is applied: that it is for this runtime."""

from autoshard.errors import PlanError
from autoshard.plan.document import Plan
from autoshard.plan.options import OWN_RUNTIME


def check_runtime(plan: Plan) -> None:
    """Refuse a plan whose times and memory are those of another framework.

    Raises:
        PlanError: it is priced for another runtime.
    """
    runtime = plan.options.runtime.name
    if runtime != OWN_RUNTIME:
        raise PlanError(
            f"the plan is priced for {runtime}, so its times and memory are not those of "
            f"autoshard's runtime: export it for that framework with `autoshard export`, or plan "
            f"with runtime={OWN_RUNTIME!r} to apply it here"
        )
