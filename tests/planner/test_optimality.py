"""Plans of plain solvers, and certificates that they confirm or contradict."""

from dataclasses import replace

import pytest
from support.meshes import slow_devices
from support.models import Planner, gpt2, graph_of, meta, mlp

from autoshard.errors import OptionError, PlanError
from autoshard.graph import Graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import check_optimality, make_plan
from autoshard.solve.programs import integer_program

MESH = slow_devices(a=2, b=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(mlp, 64, 256, 512, 256))


@pytest.fixture(scope="module")
def plan(planned: Planner, graph: Graph) -> Plan:
    return planned(graph, MESH)


@pytest.fixture(scope="module")
def wide() -> Graph:
    return graph_of(meta(mlp, 8192, 1024, 1024, 1024))


@pytest.fixture(scope="module")
def tight(planned: Planner, wide: Graph) -> Plan:
    """A plan whose parameters are cut at rest only because memory is short."""
    least = planned(wide, (4,), memory_budget=1).conflict.least_budget
    return planned(wide, (4,), memory_budget=int(1.2 * least))


@pytest.mark.parametrize("solver", ["ilp", "scipy"])
def test_a_plain_solver_makes_a_plan_of_equal_cost(graph: Graph, plan: Plan, solver: str) -> None:
    other = make_plan(graph, MESH, solver=solver)
    assert other.certificate.objective == pytest.approx(plan.certificate.objective, rel=1e-3)
    assert other.certificate.gap <= 1e-3
    assert other.id != plan.id


def test_a_plain_solver_obeys_the_budget(wide: Graph, tight: Plan) -> None:
    other = make_plan(wide, make_mesh((4,)), tight.options, solver="ilp")
    assert other.memory.peak <= tight.memory.budget
    assert other.costs.total == pytest.approx(tight.costs.total, rel=2e-3)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_certificate_is_confirmed(graph: Graph, mode: str) -> None:
    made = make_plan(graph, MESH, PlanOptions(mode=mode))
    (check,) = check_optimality(made, graph)
    assert check.is_whole
    assert check.is_confirmed
    assert not check.contradictions
    assert check.found == pytest.approx(made.costs.total, rel=1e-5)
    assert "% of the optimum. The certificate is confirmed." in check.statement
    assert f"({check.whole_size})" in check.statement


def test_a_certificate_under_a_budget_is_checked_with_memory(wide: Graph, tight: Plan) -> None:
    (check,) = check_optimality(tight, wide)
    assert check.is_whole
    assert not check.contradictions
    assert check.bound == pytest.approx(tight.costs.total, rel=2e-3)


def test_a_bound_above_a_plan_is_contradicted(graph: Graph, plan: Plan) -> None:
    total = plan.costs.total
    certificate = plan.certificate.model_copy(update={"bound": 1.01 * total})
    (check,) = check_optimality(plan.model_copy(update={"certificate": certificate}), graph)
    assert not check.is_confirmed
    assert "but the certificate says that none takes less than" in check.contradictions[0]
    assert check.statement == "the certificate is contradicted."


def test_a_plan_below_the_optimum_is_contradicted(graph: Graph, plan: Plan) -> None:
    costs = plan.costs.model_copy(update={"total": 0.99 * plan.costs.total})
    (check,) = check_optimality(plan.model_copy(update={"costs": costs}), graph)
    assert "proved that no plan takes less than" in check.contradictions[-1]


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (0.9, "is higher and not confirmed; nothing contradicts it."),
        (None, "ilp proved no bound in the time limit: nothing is confirmed."),
    ],
)
def test_a_bound_that_ends_below_the_certificate_confirms_nothing(
    graph: Graph, plan: Plan, bound: float | None, words: str
) -> None:
    (check,) = check_optimality(plan, graph)
    weak = None if bound is None else bound * plan.costs.total
    late = replace(check, bound=weak, found=None)
    assert not late.is_confirmed
    assert not late.contradictions
    assert late.statement.endswith(words)


def test_a_problem_that_is_too_large_is_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = graph_of(meta(gpt2, layers=3))
    made = make_plan(layers, (2,))
    (whole,) = check_optimality(made)
    assert whole.is_confirmed
    monkeypatch.setattr(integer_program, "MAX_COLUMNS", whole.size.columns - 1)
    (alike,) = check_optimality(made, layers)
    assert not alike.is_whole
    assert not alike.is_confirmed
    assert alike.size.columns < whole.size.columns == alike.whole_size.columns
    assert alike.found >= made.costs.total * (1 - 1e-9)
    assert "proves nothing about plans whose blocks differ" in alike.statement
    monkeypatch.setattr(integer_program, "MAX_COLUMNS", 10)
    with pytest.raises(OptionError, match="more than the 10 that a plain solver may get"):
        check_optimality(made)


def test_stages_of_a_pipeline_are_checked_one_by_one() -> None:
    layers = graph_of(meta(gpt2, layers=2))
    options = PlanOptions(stages=2, schedule="1F1B", micro_batches=4)
    checks = check_optimality(make_plan(layers, make_mesh((2, 2)), options))
    assert [check.stage for check in checks] == [0, 1]
    for check in checks:
        assert not check.contradictions
        assert check.statement.startswith(f"stage {check.stage}: ilp got the whole problem")


def test_what_cannot_be_checked_is_refused(graph: Graph, plan: Plan) -> None:
    with pytest.raises(OptionError, match="autoshard is not a plain solver: use ilp"):
        check_optimality(plan, graph, solver="autoshard")
    with pytest.raises(OptionError, match=r"finds no solver NOSUCH .* use ilp, "):
        check_optimality(plan, graph, solver="nosuch")
    with pytest.raises(OptionError, match="finds no solver SCS of integer programs"):
        make_plan(graph, MESH, solver="scs")
    with pytest.raises(OptionError, match="solver"):
        PlanOptions(solver="two words")
    with pytest.raises(PlanError, match="another graph"):
        check_optimality(plan, graph_of(meta(mlp, 32, 16, 16, 16)))
