"""Memory and cost of the memory problem, compared with those of finished plans."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn

from autoshard.costs import GATHERED_ONCE, Frequency
from autoshard.errors import PlanError
from autoshard.layouts import Action
from autoshard.lowering.timeline import timeline
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import PlanOptions
from autoshard.planner.budget.solver import BudgetSolver
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.saved_tensors import SavedTensors
from autoshard.planner.formulation.stage_builder import Decisions, StageBuilder, with_gathers_again
from autoshard.planner.formulation.variables import Role
from autoshard.planner.memory.memory_problem import MemoryProblem
from autoshard.planner.memory.time_points import BackwardPoint
from autoshard.solve import minimum_usage, solve_problem


class Measured(NamedTuple):
    """What a plan costs and takes."""

    cost: float
    nbytes: float
    """the most at the turn and at the optimizer's step"""
    peak: float
    """the most at any moment"""


class Product(nn.Module):
    """A matrix product saves both of its factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


class HalfProducts(nn.Module):
    """A product of 16-bit activations and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        self.product = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.to(torch.bfloat16) * self.scale).sum()


class TwoReaders(nn.Module):
    """A value that two operators save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return (y.sin() * y).sum()


class ThroughAView(nn.Module):
    """A value that is saved as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).t().sin().sum()


class SavesWhatItMakes(nn.Module):
    """A value that its own operator saves, and its reader too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).exp().sin().sum()


class Scores(nn.Module):
    """A loss of 16-bit scores, which are converted first."""

    target: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("target", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x * self.weight).to(torch.bfloat16).float()
        return nn.functional.cross_entropy(scores, self.target, reduction="none").sum()


class Layers(nn.Module):
    """Blocks that are alike."""

    num_layers = 4

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(8, 8) for _ in range(self.num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.exp(torch.tanh(torch.sin(x @ weight)))
        return x.square().sum()


class ThreeLayers(Layers):
    """So few that all plans with micro-batches can be tried."""

    num_layers = 3


class ResidualLayers(Layers):
    """Blocks whose results have two readers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + torch.tanh(torch.sin(x @ weight))
        return x.square().sum()


def formulated(
    module: type[nn.Module], shape: Sequence[int], mesh: Mesh, **options: Any
) -> Formulation:
    with torch.device("meta"):
        graph = graph_of((module(), {"x": torch.ones(*shape)}))
    return Formulation.of(graph, mesh, PlanOptions(**options))


def subsets(items: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def measured(formulation: Formulation, decisions: Decisions) -> Measured:
    builder = StageBuilder(formulation, with_gathers_again(formulation, decisions))
    stage = builder.stage()
    found = timeline(stage, formulation.graph, training=True, saving=formulation.prices.saving)
    assert found.turn is not None
    held = max(found.total[found.turn], found.total[-1])
    return Measured(builder.costs(stage).total, float(held), float(found.peak))


def every_plan(formulation: Formulation) -> Iterator[Measured]:
    """All choices, with everything resharded again, checkpointed and run once that can be."""
    saved = SavedTensors(formulation.prices, formulation.blocks, formulation.checkpoint_units)
    spans = [span.nodes for span in dict.fromkeys(saved.spans) if span is not None]
    allowed = [np.flatnonzero(np.isfinite(v.time)).tolist() for v in formulation.variables]
    for choice in product(*allowed):
        if not np.isfinite(formulation.problem.objective(choice)):
            continue
        picks = np.array(choice)
        stage = StageBuilder(formulation, Decisions(picks)).stage()
        moving = {
            c.use
            for c in stage.reshardings
            if any(step.forward != Action.NOTHING for step in c.steps)
        }
        uses = [i for i, use in enumerate(formulation.uses) if formulation.use_key(use) in moving]
        for frequencies in every_frequency(formulation, picks):
            rare = {i for i, kind in frequencies.items() if kind in GATHERED_ONCE}
            often = [i for i in uses if i not in rare]
            for regathered, checkpoints in product(subsets(often), subsets(spans)):
                again = frozenset(regathered)
                decisions = Decisions(picks, again, checkpoints, frequencies)
                try:
                    yield measured(formulation, decisions)
                except PlanError as error:
                    assert "inside a checkpoint" in str(error)  # noqa: PT017  what is no plan


def every_frequency(
    formulation: Formulation, picks: NDArray[np.intp]
) -> Iterator[dict[int, Frequency]]:
    """All ways to run the gathers of parameters, and the reductions of their gradients."""
    kinds: dict[int, tuple[Frequency, ...]] = {}
    for number, use in enumerate(formulation.uses):
        if formulation.reads_parameter(use):
            ends = (int(picks[i]) for i in (use.source, use.target))
            kinds[number] = formulation.edge_costs(use).frequencies(*ends)
    for chosen in product(*kinds.values()):
        yield dict(zip(kinds, chosen, strict=True))


def some(limits: set[float]) -> list[float]:
    ordered = sorted(limits)
    return ordered[:: max(len(ordered) // 12, 1)]


def assert_agrees(formulation: Formulation, plans: Sequence[Measured]) -> None:
    """At every limit the solution costs as much as the cheapest plan that holds no more."""
    memory = MemoryProblem(
        formulation, reshard_after_forward="auto", activation_checkpointing="auto"
    )
    assert minimum_usage(memory.problem) == pytest.approx(min(plan.nbytes for plan in plans))
    for limit in some({plan.nbytes for plan in plans}):
        cheapest = min(plan.cost for plan in plans if plan.nbytes <= limit)
        solution = solve_problem(replace(memory.problem, usage_limit=limit), relative_gap=0)
        assert solution.objective == pytest.approx(cheapest, rel=1e-9)
        assert solution.choice is not None
        found = measured(formulation, memory.decisions(solution.choice))
        assert found.cost == pytest.approx(cheapest, rel=1e-9)
        assert found.nbytes <= limit


def assert_bounds(formulation: Formulation, plans: Sequence[Measured]) -> None:
    """With moments of backward, a limit on the peak leaves every plan that obeys it."""
    inside, variables = formulation.inside_blocks, formulation.variables
    outside = [i for i in range(len(variables)) if i not in inside]
    blocks = dict.fromkeys(map(formulation.first_of, formulation.unit_of.values()))
    memory = MemoryProblem(
        formulation,
        reshard_after_forward="auto",
        activation_checkpointing="auto",
        points=[
            *(BackwardPoint(variable=i) for i in outside if variables[i].role is Role.OPERATOR),
            *(BackwardPoint(variable=i, starts_block=True) for i in blocks),
            *(
                BackwardPoint(use=i)
                for i, use in enumerate(formulation.uses)
                if use.source not in inside and use.target not in inside
            ),
        ],
    )
    for limit in some({plan.peak for plan in plans}):
        cheapest = min(plan.cost for plan in plans if plan.peak <= limit)
        solution = solve_problem(replace(memory.problem, usage_limit=limit), relative_gap=0)
        assert solution.bound <= cheapest * (1 + 1e-9)


@pytest.mark.parametrize("module", [Layers, ResidualLayers])
def test_nodes_take_what_goes_with_the_strategies_of_variables(module: type[nn.Module]) -> None:
    formulation = formulated(module, (4, 8), slow_devices(a=2, b=2))
    memory = MemoryProblem(
        formulation, reshard_after_forward="auto", activation_checkpointing="auto"
    )
    least = minimum_usage(memory.problem)
    for limit in (1.1 * least, 1.5 * least, np.inf):
        solution = solve_problem(replace(memory.problem, usage_limit=limit), relative_gap=0.01)
        assert solution.choice is not None
        chosen = memory.decisions(solution.choice).choice
        masks = [
            np.arange(len(variable.strategies)) == strategy
            for variable, strategy in zip(formulation.variables, chosen, strict=True)
        ]
        kept = memory.nodes_with(masks)
        assert all(mask[s] for mask, s in zip(kept, solution.choice, strict=True))
        assert sum(map(np.sum, kept)) < sum(len(mask) for mask in kept)


@pytest.mark.parametrize(("in_flight", "micro_batches"), [(1, 1), (1, 2), (2, 2)])
def test_the_memory_of_given_strategies_is_that_of_all_restricted_to_them(
    in_flight: int, micro_batches: int
) -> None:
    options = {"micro_batches": micro_batches, "in_flight": in_flight}
    formulation = formulated(Layers, (4, 8), slow_devices(a=2, b=2), **options)
    solver = BudgetSolver(formulation, PlanOptions())
    chosen = solve_problem(formulation.problem).choice
    assert chosen is not None
    points = [
        BackwardPoint(variable=i)
        for i, variable in enumerate(formulation.variables)
        if variable.role is Role.OPERATOR
    ][::3]
    masks = [
        np.arange(len(variable.strategies)) == strategy
        for variable, strategy in zip(formulation.variables, chosen, strict=True)
    ]
    every = solver.count(0.0, points).restricted(masks)
    given = solver.count_given(chosen, 0.0, points)
    least = minimum_usage(every.problem)
    assert minimum_usage(given.problem) == least
    for limit in (least, 1.1 * least, np.inf):
        one, other = (
            solve_problem(counted.problem.with_limit(limit), relative_gap=0)
            for counted in (every, given)
        )
        assert one.objective == pytest.approx(other.objective)
        assert other.choice is not None
        assert (given.decisions(other.choice).choice == chosen).all()
        found = solver.build(given.decisions(other.choice))
        assert found.costs.total == pytest.approx(other.objective)


@pytest.mark.parametrize(("in_flight", "is_known"), [(1, True), (2, False)])
def test_a_choice_is_continued_when_more_time_points_are_counted(
    in_flight: int, is_known: bool
) -> None:
    options = {"micro_batches": in_flight, "in_flight": in_flight}
    formulation = formulated(Layers, (4, 8), slow_devices(a=2, b=2), **options)
    solver = BudgetSolver(formulation, PlanOptions())
    plain = solver.count(0.0)
    operators = [
        i for i, variable in enumerate(formulation.variables) if variable.role is Role.OPERATOR
    ]
    pointed = solver.count(0.0, [BackwardPoint(variable=i) for i in operators[::3]])
    choice = solve_problem(plain.problem).choice
    assert choice is not None
    continued = pointed.completed(choice[: plain.num_common])
    assert (continued is not None) == is_known
    if continued is not None:
        assert len(continued) > len(choice)
        expected = pytest.approx(plain.problem.objective(choice))
        assert pointed.problem.objective(continued) == expected
        assert (pointed.decisions(continued).choice == plain.decisions(choice).choice).all()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("module", "shape", "pinned", "options"),
    [
        (Product, (4, 4), {}, {}),
        (TwoReaders, (4,), {"mul_1": "S(0)"}, {}),
        (ThroughAView, (4, 2), {"sin*": "S(1)"}, {}),
        (SavesWhatItMakes, (4,), {}, {}),
        pytest.param(TwoReaders, (4,), {"mul_1": "R"}, {}, marks=pytest.mark.long),
        pytest.param(
            TwoReaders, (4,), {"mul_1": "R"}, {"regather_activations": True}, marks=pytest.mark.long
        ),
        (Scores, (2, 4), {"to*": "S(0)", "cross*": "S(0)"}, {"execution": "compile"}),
        (SavesWhatItMakes, (4,), {"sin*": "R"}, {"regather_activations": True}),
        (Product, (4, 4), {}, {"overlap": True}),
        (SavesWhatItMakes, (4,), {}, {"overlap": True}),
        (Product, (4, 4), {}, {"micro_batches": 3}),
        (Product, (4, 4), {}, {"micro_batches": 2, "accumulation_dtype": "bfloat16"}),
        pytest.param(
            SavesWhatItMakes,
            (4,),
            {},
            {"micro_batches": 4, "overlap": True},
            marks=pytest.mark.long,
        ),
        (Product, (4, 4), {}, {"micro_batches": 3, "in_flight": 3}),
        pytest.param(
            *(TwoReaders, (4,), {"mul_1": "S(0)"}, {"micro_batches": 8, "in_flight": 2}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(ThroughAView, (4, 2), {"sin*": "S(1)"}, {"micro_batches": 5, "in_flight": 4}),
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_limit_has_the_best_of_all_plans(
    module: type[nn.Module],
    shape: tuple[int, ...],
    pinned: dict[str, str],
    options: dict[str, Any],
) -> None:
    """A pinned operator leaves a few thousand plans to try; what it reads is free."""
    pins = {"inputs": {"x": "S(0)"}, "nodes": {"sum*": "P", **pinned}}
    formulation = formulated(module, shape, slow_devices(a=2), pins=pins, **options)
    plans = list(every_plan(formulation))
    assert_agrees(formulation, plans)
    assert_bounds(formulation, plans)


class Head(nn.Module):
    """A product with a weight that is much larger than what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.sin()).sum()


def test_what_is_gathered_again_for_an_operator_is_counted_while_that_runs() -> None:
    options = PlanOptions(
        pins={
            "inputs": {"x": "S(0)"},
            "parameters": {"*": "S(0)"},
            "nodes": {"linear*": "S(0) R -> S(0)"},
        },
        reshard_after_forward="always",
        activation_checkpointing="never",
    )
    with torch.device("meta"):
        graph = graph_of((Head(), {"x": torch.zeros(8, 64, requires_grad=True)}))
    formulation = Formulation.of(graph, slow_devices(a=2), options)
    solver, variables = BudgetSolver(formulation, options), formulation.variables
    reader = next(i for i, v in enumerate(variables) if v.name.startswith("linear"))
    counted = solver.count(0.0, [BackwardPoint(variable=reader)])
    choice = solve_problem(counted.problem).choice
    assert choice is not None
    peak = solver.build(counted.decisions(choice)).memory.peak
    # The weight and its gradient are whole; without the time point, only their shards count.
    least = minimum_usage(counted.problem)
    assert peak - 64 <= least <= peak
    assert minimum_usage(solver.count(0.0).problem) < peak - 256 * 64 * 4


@pytest.mark.thorough
@pytest.mark.parametrize("regathers", [False, True])
def test_what_products_save_in_float8_is_counted_so(regathers: bool) -> None:
    mesh = make_mesh((2,), axes=("a",), topology="h100-sxm")
    options = {
        "pins": {"inputs": {"x": "S(0)"}, "nodes": {"linear*": "R", "sum*": "R"}},
        "runtime": "other",
        "float8_modules": ("product",),
        "regather_activations": regathers,
        "overlap": False,
    }
    plain, narrow = (
        formulated(HalfProducts, (16, 16), mesh, **options, float8_saved_inputs=is_narrow)
        for is_narrow in (False, True)
    )
    least = [min(plan.nbytes for plan in every_plan(f)) for f in (plain, narrow)]
    # Of what the product reads, 16 x 16 numbers, a rank keeps at least its half.
    assert least[0] - least[1] == 16 * 16 / 2
    assert_agrees(narrow, list(every_plan(narrow)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "num_ranks", "options"),
    [
        (ResidualLayers, 1, {}),
        (ThreeLayers, 2, {}),
        pytest.param(Layers, 2, {}, marks=pytest.mark.long),
        pytest.param(Layers, 2, {"overlap": True}, marks=pytest.mark.long),
        pytest.param(ThreeLayers, 2, {"micro_batches": 3}, marks=pytest.mark.long),
        (ResidualLayers, 1, {"micro_batches": 16, "in_flight": 16}),
        pytest.param(
            *(ThreeLayers, 2, {"micro_batches": 6, "in_flight": 4}), marks=pytest.mark.long
        ),
    ],
)
def test_blocks_are_recomputed_where_it_costs_least(
    module: type[nn.Module],
    num_ranks: int,
    options: dict[str, Any],
) -> None:
    """On two ranks, weights are gathered: kept, gathered again, or recomputed with their block."""
    names = ("matmul", "sin", "tanh", "exp", "square")
    pins = {
        "inputs": {"x": "S(0)"},
        "parameters": {"*": "S(0)"},
        "nodes": {f"{name}*": "S(0)" for name in names},
    }
    mesh = slow_devices(a=num_ranks)
    pins = pins if num_ranks > 1 else {}
    formulation = formulated(module, (4, 8), mesh, pins=pins, **options)
    plans = list(every_plan(formulation))
    (block,) = formulation.blocks
    assert len(plans) >= 2**block.count
    assert_agrees(formulation, plans)
    assert_bounds(formulation, plans)
