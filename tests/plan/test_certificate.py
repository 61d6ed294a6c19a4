"""The certificate in words says no more than what is proven."""

import pytest

from autoshard.base.outcome import SolveStatus, relative_gap
from autoshard.mesh import make_mesh
from autoshard.plan import Certificate, PlanOptions
from autoshard.plan.certificate import certificate_statement, percent
from autoshard.plan.options.restrictions import restrictions, without_restrictions

MESH = make_mesh((2, 4), topology="h100-sxm")


def certificate(
    bound: float | None, *, objective: float = 0.5, status: SolveStatus = SolveStatus.OPTIMAL
) -> Certificate:
    gap = None if bound is None else relative_gap(objective, bound)
    return Certificate(status=status, objective=objective, bound=bound, gap=gap)


def test_an_exact_proof_and_one_within_a_gap_differ() -> None:
    exact = certificate_statement(certificate(0.5), PlanOptions(), MESH)
    assert exact == (
        "Optimal among the plans of one stage in offered layouts that fit 80 GB per device: none "
        "is faster under the cost model of h100-sxm."
    )
    within = certificate_statement(certificate(0.49998), PlanOptions(), MESH)
    assert within == (
        "Within 0.0040 % of the optimum among the plans of one stage in offered layouts that fit "
        "80 GB per device: none takes less than 499.98 ms under the cost model of h100-sxm."
    )


def test_an_unproven_plan_is_not_called_optimal() -> None:
    options = PlanOptions(memory_budget=10_000_000_000)
    late = certificate_statement(certificate(0.4, status=SolveStatus.FEASIBLE), options, MESH)
    assert late.startswith("Not optimal yet, but proven within 20 % of the optimum among the plans")
    assert "fit 10 GB per device" in late
    stopped = certificate_statement(certificate(0.4, status=SolveStatus.CANCELLED), options, MESH)
    assert stopped.startswith("Stopped early, but proven within 20 %")
    unknown = certificate_statement(certificate(None, status=SolveStatus.FEASIBLE), options, MESH)
    assert unknown == (
        "No lower bound is proven: faster plans may exist under the cost model of h100-sxm."
    )
    no_plan = Certificate(status=SolveStatus.INFEASIBLE, objective=None, bound=None, gap=None)
    assert certificate_statement(no_plan, options, MESH) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algo": "megatron"}, "algo 'megatron'"),
        (
            {"pins": {"parameters": {"*.weight": "*,S(0)"}}},
            "pin of parameter '*.weight' to '*,S(0)'",
        ),
        ({"forbid": [{"kind": "all_to_all", "axis": "tp"}]}, "forbidden all_to_all@tp"),
        ({"batch_axis": "dp"}, "batch_axis 'dp'"),
        ({"skip_fully_replicated": True}, "skip_fully_replicated"),
        ({"reshard_after_forward": "always"}, "reshard_after_forward 'always'"),
        ({"activation_checkpointing": "never"}, "activation_checkpointing 'never'"),
        ({"schedule": "1F1B"}, "schedule '1F1B'"),
        ({"cuts": ["before:h.1"]}, "cuts 'before:h.1'"),
    ],
)
def test_each_restriction_is_named(options: dict[str, object], words: str) -> None:
    restricted = PlanOptions(**options | {"memory_budget": 1 << 33, "stages": 2})
    assert restrictions(restricted) == (words,)
    statement = certificate_statement(certificate(0.5), restricted, MESH)
    assert f"and obey {words}: none is faster" in statement
    free = without_restrictions(restricted)
    assert restrictions(free) == ()
    assert (free.memory.budget, free.pipeline.stages) == (1 << 33, 2)


def test_many_restrictions_are_counted() -> None:
    pins = {f"layers.{n}": "R,R" for n in range(9)}
    options = PlanOptions(pins={"nodes": pins}, batch_axis="dp")
    statement = certificate_statement(certificate(0.5), options, MESH)
    assert "pin of node 'layers.3' to 'R,R' and 6 more options: none is faster" in statement


def test_a_pipeline_is_proven_among_the_pipelines_of_its_bound() -> None:
    options = PlanOptions(stages=2, micro_batches=4, schedule="1F1B")
    statement = certificate_statement(certificate(0.4), options, MESH, "cuts at 5 places")
    assert statement == (
        "Within 20 % of a lower bound of 400.00 ms under the cost model of "
        "h100-sxm. It holds for these pipelines: cuts at 5 places. Its plans obey schedule '1F1B'."
    )


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (1e-7, "0.000010 %"), (0.0004, "0.040 %"), (0.04201, "4.3 %"), (0.2, "20 %")],
)
def test_gaps_are_never_rounded_down(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_time_limit_is_named_if_it_ended_the_search() -> None:
    open_gap = certificate(0.4, status=SolveStatus.FEASIBLE)
    late = certificate_statement(open_gap, PlanOptions(), MESH, late=True)
    assert late.startswith("Stopped by the time limit, but proven within ")
