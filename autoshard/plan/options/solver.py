"""Options of the solver: which one, its time limit and its gap."""

from typing import Annotated, ClassVar

from pydantic import Field

from autoshard.base.arguments import MAX_SECONDS, Flag, Number, Whole
from autoshard.base.integers import MAX_INT32
from autoshard.base.outcome import OWN_SOLVER
from autoshard.plan.options.group import Declared, OptionGroup


class SolverOptions(OptionGroup):
    """Solver of the optimization problem, and the limits within which it must answer."""

    title: ClassVar[str] = "Solver"

    name: Annotated[str, Declared(keyword="solver", metavar="autoshard|ilp|NAME")] = Field(
        default=OWN_SOLVER,
        pattern="^[A-Za-z][A-Za-z0-9_]*$",
        max_length=64,
        description=(
            "solver of the optimization problem. autoshard: the problem is reduced first. ilp: it "
            "is stated as one integer program, without reductions, which HiGHS solves; for small "
            "problems. Or another solver of integer programs that cvxpy finds, such as SCIP or "
            "GUROBI. Of pipelines, it plans the stages."
        ),
    )
    time_limit: Annotated[Number, Declared(metavar="SECONDS")] = Field(
        default=60.0,
        gt=0,
        le=MAX_SECONDS,
        description=(
            "time limit, seconds, of listing the strategies and of solving; a request ends at most "
            "10 % and two seconds after it on a quiet machine."
        ),
    )
    relative_gap: Number = Field(
        default=1e-3,
        ge=0,
        lt=1,
        description="stop at a proven relative gap of at most this between plan and lower bound.",
    )
    seed: Whole = Field(
        default=0, ge=0, le=MAX_INT32, description="seed of the solver's random numbers."
    )
    comparisons: Annotated[Flag, Declared(flags=())] = Field(
        default=False,
        description=(
            "whether the plan says what DDP, FSDP2, HSDP and Megatron would take on the same "
            "devices, and what its restrictions cost. They are planned in addition, within half of "
            "the time limit."
        ),
    )
