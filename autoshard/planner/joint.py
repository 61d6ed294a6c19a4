"""Plans of several programs over one set of parameters, optimized together.

A model that trains, evaluates and decodes runs a program for each, and stores its parameters and
buffers once. `make_plans` finds one layout for each of them, and a plan for each program, with the
least weighted sum of step times: the problems of all programs are solved as one, with the layouts
of what they share tied. Memory is not part of that problem, so each program is then planned within
its budget with these layouts, and with those of every program's own plan; the best are returned.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.base.outcome import relative_gap
from autoshard.errors import OptionError, PlanError
from autoshard.graph import Graph, GraphLike, Input, InputKind, to_graph
from autoshard.mesh import Mesh, MeshLike, to_mesh
from autoshard.ops.rules.legality import without_invariant
from autoshard.plan.document import Plan
from autoshard.plan.options import Pins, PlanOptions, to_options
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role
from autoshard.planner.pipeline.policies import num_stages, stage_cutter
from autoshard.planner.planner import make_stage_plan
from autoshard.solve import Edge, Problem, ProblemNode, Repeat, ShortestPathCost, solve_problem

_SHARED = {InputKind.PARAMETER: "parameters", InputKind.BUFFER: "buffers"}


@dataclass(frozen=True)
class JointPlans:
    """Plans that store parameters and buffers alike.

    Attributes:
        plans: a plan for each program, for `parallelize`. Each certificate is among the plans with
            the pins of that plan.
        objective: weighted sum of the predicted times of a step, seconds.
        bound: proven lower bound of the objective of all such plans; None if there is none.
    """

    plans: Mapping[str, Plan]
    objective: float
    bound: float | None

    @property
    def gap(self) -> float | None:
        """Relative gap of objective and bound."""
        return None if self.bound is None else relative_gap(self.objective, self.bound)


def make_plans(
    programs: Mapping[str, tuple[GraphLike, PlanOptions]],
    mesh: MeshLike,
    *,
    weights: Mapping[str, float] | None = None,
) -> JointPlans:
    """Plan several programs of one model together.

    Args:
        programs: program and options of each, by name; programs as for `make_plan`.
        mesh: the devices and the links between them, as for `make_plan`.
        weights: how often each program runs, by name; 1 for those that are not listed.

    Raises:
        GraphError: a program cannot be planned in its mode.
        OptionError: an option or a weight is invalid.
        PlanError: a program has no plan, or no layouts fit the memory budgets of all.

    Example:
        Training, with an evaluation of 50 batches after every 1,000 steps:

        >>> joint = make_plans(
        ...     {"train": (train_graph, PlanOptions()),
        ...      "eval": (eval_graph, PlanOptions(mode="inference"))},
        ...     make_mesh((2, 4)),
        ...     weights={"train": 1000, "eval": 50},
        ... )
        >>> model = parallelize(model, joint.plans, device_mesh)
    """
    if not programs:
        raise OptionError("no programs are given")
    read = {
        name: (to_graph(graph), to_options(options, {}))
        for name, (graph, options) in programs.items()
    }
    return _joint_plans(read, to_mesh(mesh), weights)


def _joint_plans(
    programs: Mapping[str, tuple[Graph, PlanOptions]],
    mesh: Mesh,
    weights: Mapping[str, float] | None,
) -> JointPlans:
    weight_of = _weights(programs, weights or {})
    _check_stages(programs)
    own = {
        name: make_stage_plan(graph, mesh, options) for name, (graph, options) in programs.items()
    }
    for name, plan in own.items():
        if not plan.found:
            raise PlanError(f"program {name!r}: {plan.reason}")
    layouts, bound = _joint_layouts(programs, mesh, weight_of)
    bounds = [plan.certificate.bound for plan in own.values()]
    if None not in bounds:
        separate = zip(bounds, weight_of.values(), strict=True)
        bound = max(bound, sum(weight * (b or 0.0) for b, weight in separate))
    best: JointPlans | None = None
    for pins in (*layouts, *(plan.state_pins() for plan in own.values())):
        found = _planned(programs, mesh, pins)
        if found is None:
            continue
        objective = sum(
            weight_of[name] * plan.costs.total for name, plan in found.items() if plan.costs
        )
        if best is None or objective < best.objective:
            best = JointPlans(found, objective, min(bound, objective) if bound > -inf else None)
        gap = min(options.solver.relative_gap for _, options in programs.values())
        if best.gap is not None and best.gap <= gap:
            break
    if best is None:
        raise PlanError(
            "no layouts of parameters that were tried fit the memory budgets of all programs: "
            "raise memory_budget, or use more devices"
        )
    return best


def _weights(programs: Mapping[str, object], weights: Mapping[str, float]) -> dict[str, float]:
    for name, weight in weights.items():
        if name not in programs:
            raise OptionError(f"there is a weight for {name!r}, but the programs are {[*programs]}")
        if not 0 < weight < inf:
            raise OptionError(f"the weight of {name!r} is {weight}; it must be positive and finite")
    return {name: float(weights.get(name, 1.0)) for name in programs}


def _planned(
    programs: Mapping[str, tuple[Graph, PlanOptions]], mesh: Mesh, pins: Pins
) -> dict[str, Plan] | None:
    """A plan for each program with given layouts; later programs follow those before them."""
    found: dict[str, Plan] = {}
    for name, (graph, options) in programs.items():
        layouts = [pins, *(plan.state_pins() for plan in found.values())]
        plan = make_stage_plan(graph, mesh, _with_layouts(graph, options, layouts))
        if not plan.found:
            return None
        found[name] = plan
    return found


def _check_stages(programs: Mapping[str, tuple[Graph, PlanOptions]]) -> None:
    for name, (graph, options) in programs.items():
        if num_stages(options, stage_cutter(graph, options)) != 1:
            raise OptionError(
                f"program {name!r}: its options ask for pipeline stages, but programs are planned "
                f"together as one stage each: plan it with make_plan, or with stages=1"
            )


def _with_layouts(graph: Graph, options: PlanOptions, layouts: Sequence[Pins]) -> PlanOptions:
    """Options with the layouts of stored tensors that a program has; its own pins come first."""
    names = {kind: set[str]() for kind in _SHARED.values()}
    for entering in graph.inputs:
        if entering.kind in _SHARED:
            names[_SHARED[entering.kind]].add(entering.target)
    update: dict[str, dict[str, str]] = {}
    for kind, known in names.items():
        wanted = {k: v for pins in layouts for k, v in getattr(pins, kind).items() if k in known}
        update[kind] = wanted | dict(getattr(options.constraints.pins, kind))
    return options.with_values(pins=options.constraints.pins.model_copy(update=update))


def _joint_layouts(
    programs: Mapping[str, tuple[Graph, PlanOptions]], mesh: Mesh, weights: Mapping[str, float]
) -> tuple[list[Pins], float]:
    """Layouts of the best plans without memory budgets, and a lower bound of the objective."""
    formulations = [Formulation.of(graph, mesh, options) for graph, options in programs.values()]
    problem, starts = _joint_problem(formulations, list(weights.values()))
    limits = [options for _, options in programs.values()]
    solution = solve_problem(
        problem,
        time_limit=max(options.solver.time_limit for options in limits),
        relative_gap=min(options.solver.relative_gap for options in limits),
        solver=limits[0].solver.name,
        seed=limits[0].solver.seed,
    )
    if solution.choice is None:
        return [], solution.bound
    layouts: dict[str, dict[str, str]] = {kind: {} for kind in _SHARED.values()}
    for formulation, start in zip(formulations, starts, strict=True):
        for number, entering, _ in _stored(formulation):
            strategy = formulation.variables[number].strategies[
                int(solution.choice[start + number])
            ]
            has_gradient = formulation.gradients.exists(entering.name)
            layout = formulation.axes.widen(strategy.outputs[0], differentiable=has_gradient)
            layouts[_SHARED[entering.kind]].setdefault(entering.target, str(layout))
    return [Pins.model_validate(layouts)], solution.bound


def _stored(formulation: Formulation) -> Iterator[tuple[int, Input, IntArray]]:
    """Variables of parameters and buffers, and a label of each layout that is equal in programs."""
    inputs = {i.name: i for i in formulation.graph.inputs if i.kind in _SHARED}
    for number, variable in enumerate(formulation.variables):
        if variable.role is Role.INPUT and variable.name in inputs:
            texts = [str(without_invariant(s.outputs[0])) for s in variable.strategies]
            yield number, inputs[variable.name], np.array(texts)


def _joint_problem(
    formulations: Sequence[Formulation], weights: Sequence[float]
) -> tuple[Problem, list[int]]:
    """The problems of all programs as one, and the first node of each."""
    nodes: list[ProblemNode] = []
    edges: list[Edge] = []
    repeats: list[Repeat] = []
    starts: list[int] = []
    first: dict[tuple[InputKind, str], tuple[int, IntArray]] = {}
    for formulation, weight in zip(formulations, weights, strict=True):
        start = len(nodes)
        starts.append(start)
        scaled = _Scaled(weight)
        problem = formulation.problem
        nodes += [replace(node, cost=scaled.array(node.cost)) for node in problem.nodes]
        edges += [
            Edge(e.source + start, e.target + start, scaled.prices(e.prices), e.rows, e.cols)
            for e in problem.edges
        ]
        repeats += [
            Repeat(tuple(tuple(v + start for v in group) for group in repeat.instances))
            for repeat in problem.repeats
        ]
        for number, entering, texts in _stored(formulation):
            key = entering.kind, entering.target
            if key not in first:
                first[key] = start + number, texts
                continue
            other, others = first[key]
            _, labels = np.unique(np.concatenate([others, texts]), return_inverse=True)
            rows, cols = labels[: len(others)], labels[len(others) :]
            edges.append(Edge.equal(other, start + number, rows, cols))
    return Problem(tuple(nodes), tuple(edges), repeats=tuple(repeats)), starts


class _Scaled:
    """Costs times a weight; equal arrays stay one, since the solver compares them by identity."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._arrays: dict[int, FloatArray] = {}
        self._paths: dict[int, ShortestPathCost] = {}

    def array(self, cost: FloatArray) -> FloatArray:
        if id(cost) not in self._arrays:
            self._arrays[id(cost)] = self._weight * cost
        return self._arrays[id(cost)]

    def prices(self, prices: FloatArray | ShortestPathCost) -> FloatArray | ShortestPathCost:
        if not isinstance(prices, ShortestPathCost):
            return self.array(prices)
        if id(prices) not in self._paths:
            sources, targets, seconds = prices.steps
            self._paths[id(prices)] = ShortestPathCost(
                prices.num_states, sources, targets, self._weight * seconds
            )
        return self._paths[id(prices)]
