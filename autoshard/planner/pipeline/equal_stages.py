"""Planning equal stages once: stages that differ only in names, such as those of middle layers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from autoshard.base.outcome import SolveStatus
from autoshard.errors import PlanError
from autoshard.graph import Graph, InputKind, Node, Ref, graph_digest, graph_to_json, layer_path
from autoshard.graph.normalise.rewriting import rewire
from autoshard.lowering.timeline import timeline
from autoshard.mesh import Mesh
from autoshard.plan.document import Plan, StageTimes
from autoshard.plan.options import Pins, PlanOptions
from autoshard.plan.predictions import Memory
from autoshard.plan.stage import Stage
from autoshard.planner.formulation.stage_builder import peak_memory
from autoshard.planner.planner import plan_id
from autoshard.pricing.execution import is_in_modules
from autoshard.pricing.prices import Prices
from autoshard.pricing.stage_times import stage_times
from autoshard.solve import KeyValueStore, content_key, read_sealed, write_sealed

LEAST_TIME_LIMIT = 5.0
"""Time limit of the search for a stage, seconds, if many stages share the time; then no search
follows a quick plan."""
_SHARED_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of micro-batches in flight for which stages are planned under a memory limit; a stage
with another number gets the plan for the next one."""
_NAMED = frozenset({InputKind.PREPARED, InputKind.USER, InputKind.LITERAL})
"""Inputs that keep their targets: equal stages have the same ones."""
_FLOAT8, _EAGER = "float8", "eager"
"""Modules of the operators of numbered programs that may multiply in float8, and run by
themselves, in the module of their layer; one in the other for those that do both."""
_NO_LIMIT = 1 << 62
"""A memory budget that no stage reaches, bytes."""


@dataclass(frozen=True)
class NumberedGraph:
    """A program whose names are numbers, so that programs that differ only in names are equal.

    Attributes:
        graph: the program with other names of values, nodes and stored tensors.
        values: new name of each value.
        nodes: new name of each node.
    """

    graph: Graph
    values: Mapping[str, str]
    nodes: Mapping[str, str]

    @classmethod
    def of(
        cls, graph: Graph, float8_modules: Sequence[str] = (), eager_modules: Sequence[str] = ()
    ) -> "NumberedGraph":
        """Number the names of a program. Prepared tensors keep theirs.

        Args:
            graph: the program.
            float8_modules: as in `PlanOptions`; operators of these modules are in one module of
                their layer then.
            eager_modules: the same of those that run by themselves.
        """
        layers: dict[str, str] = {}

        def module(node: Node) -> str:
            path = layer_path(node.module)
            parts = [layers.setdefault(path, str(len(layers)))] if path else []
            parts += [_FLOAT8] * is_in_modules(node, float8_modules)
            return ".".join(parts + [_EAGER] * is_in_modules(node, eager_modules))

        values = {i.name: f"i{n}" for n, i in enumerate(graph.inputs)}
        values |= {i.name: i.name for i in graph.inputs if i.kind is InputKind.PREPARED}
        for number, node in enumerate(graph.nodes):
            values |= {value: f"v{number}.{n}" for n, value in enumerate(node.outputs)}
        nodes = {node.name: f"n{number}" for number, node in enumerate(graph.nodes)}
        numbered = replace(
            graph,
            inputs=tuple(
                replace(
                    i,
                    name=values[i.name],
                    target=i.target if i.kind in _NAMED else f"t{n}",
                    aliases=(),
                )
                for n, i in enumerate(graph.inputs)
            ),
            nodes=tuple(
                replace(_renamed(node, nodes[node.name], values), module=module(node))
                for node in graph.nodes
            ),
            outputs=tuple(
                replace(
                    output,
                    name=None if output.name is None else values[output.name],
                    updates=None if output.updates is None else values[output.updates],
                )
                for output in graph.outputs
            ),
            values={values[name]: tensor for name, tensor in graph.values.items()},
            model=None,
        )
        return cls(numbered, values, nodes)


def _renamed(node: Node, name: str, values: Mapping[str, str]) -> Node:
    wired = rewire(node, lambda value: Ref(values[value]))
    return replace(
        wired, name=name, outputs=tuple(values[value] for value in node.outputs), module="", part=0
    )


class StagePlan(NamedTuple):
    """The plan of a stage.

    Attributes:
        plan: the plan.
        times: its seconds by pass; None if it has no plan.
        bound: lower bound of the seconds of all plans of the stage in a step; None if it is not
            known.
    """

    plan: Plan
    times: StageTimes | None
    bound: float | None = None


class EqualStages:
    """Plans stages, each kind once.

    Args:
        plan_stage: plans a program on a mesh.
        quick_plan: plans a program under a memory budget in little time; None if it finds no plan.
        store: of plans, used beside those of this object; None for none.
    """

    def __init__(
        self,
        plan_stage: Callable[[Graph, Mesh, PlanOptions], Plan],
        quick_plan: Callable[[Graph, Mesh, PlanOptions], Plan | None],
        store: KeyValueStore | None = None,
    ) -> None:
        self._plan_stage = plan_stage
        self._quick_plan = quick_plan
        self._store = store
        self._known: dict[str, StagePlan] = {}
        # Memory of plans by their ids, and the number of micro-batches in flight.
        self._peaks: dict[tuple[str, int], Memory] = {}

    def plan(self, graph: Graph, mesh: Mesh, options: PlanOptions) -> StagePlan:
        """The plan of a program with its own names."""
        pins = options.constraints.pins
        has_names = (
            pins.parameters or pins.buffers or pins.nodes or options.memory.checkpointed_modules
        )
        if has_names:
            return _with_own_bound(self._new(graph, mesh, options))
        numbered = NumberedGraph.of(
            graph, options.runtime.float8_modules, options.runtime.eager_modules
        )
        inputs = {numbered.values.get(name, name): x for name, x in pins.inputs.items()}
        pins = Pins(inputs=inputs, outputs=pins.outputs)
        update: dict[str, Any] = {"pins": pins, "comparisons": False}
        if options.runtime.float8_modules:
            update["float8_modules"] = (f"*{_FLOAT8}",)
        if options.runtime.eager_modules:
            update["eager_modules"] = (f"*{_EAGER}",)
        options = options.with_values(**update)
        found = self._without_limit(numbered.graph, mesh, options)
        if found is None:
            found = self._for_more(numbered.graph, mesh, options)
        if found is None:
            found = _with_own_bound(self._known_or_new(numbered.graph, mesh, options))
        return found._replace(plan=_with_names(found.plan, numbered, graph))

    def _without_limit(self, graph: Graph, mesh: Mesh, options: PlanOptions) -> StagePlan | None:
        """The fastest plan, which is the same for all limits that it does not reach, if it fits."""
        free = options.with_values(memory_budget=_NO_LIMIT, in_flight=1)
        if options.mode != "training" or "always" in (
            options.memory.activation_checkpointing,
            options.memory.reshard_after_forward,
        ):
            return None
        found = _with_own_bound(self._known_or_new(graph, mesh, free))
        return self._if_it_fits(found, graph, mesh, options)

    def _for_more(self, graph: Graph, mesh: Mesh, options: PlanOptions) -> StagePlan | None:
        """A plan for a few more micro-batches in flight, which several stages can share."""
        number = next(
            (n for n in _SHARED_NUMBERS if n >= options.pipeline.in_flight),
            options.pipeline.in_flight,
        )
        number = min(number, options.training.micro_batches)
        if options.mode != "training" or number == options.pipeline.in_flight:
            return None
        # Its bound is left out: with fewer micro-batches in flight there is more memory, and there
        # may be faster plans.
        more = options.with_values(in_flight=number)
        return self._if_it_fits(self._known_or_new(graph, mesh, more), graph, mesh, options)

    def _if_it_fits(
        self, found: StagePlan, graph: Graph, mesh: Mesh, options: PlanOptions
    ) -> StagePlan | None:
        """A plan with another number of micro-batches in flight, if it fits into the budget."""
        if not found.plan.found:
            return None
        stage = found.plan.stages[0].model_copy(update={"in_flight": options.pipeline.in_flight})
        budget = options.memory.budget or mesh.topology.device.memory
        key = found.plan.id, options.pipeline.in_flight
        if key not in self._peaks:
            prices = Prices(graph, mesh, options)
            own = timeline(
                stage,
                graph,
                training=True,
                optimizer=prices.optimizer,
                saving=prices.saving,
            )
            self._peaks[key] = peak_memory(own, budget)
        peak = self._peaks[key].model_copy(update={"budget": budget})
        if peak.peak > budget:
            return None
        update = {"stages": (stage,), "memory": peak, "options": options}
        return found._replace(plan=found.plan.model_copy(update=update))

    def _known_or_new(self, graph: Graph, mesh: Mesh, options: PlanOptions) -> StagePlan:
        key = plan_id(graph, mesh, options)
        if key not in self._known:
            stored = self._stored(key, graph)
            self._known[key] = stored or self._new(graph, mesh, options)
            plan, times, _ = self._known[key]
            is_final = plan.certificate.status is not SolveStatus.CANCELLED
            if stored is None and self._store is not None and times is not None and is_final:
                body = {"plan": plan.to_json(), "times": times.model_dump()}
                write_sealed(self._store, _store_key(key), json.dumps(body).encode())
        return self._known[key]

    def _new(self, graph: Graph, mesh: Mesh, options: PlanOptions) -> StagePlan:
        quick = None
        if options.memory.budget != _NO_LIMIT and may_be_quick(options):
            quick = self._quick_plan(graph, mesh, options)
        if quick is not None and options.solver.time_limit <= LEAST_TIME_LIMIT:
            plan = quick
        else:
            plan = self._plan_stage(graph, mesh, options)
            if quick is not None and _seconds(quick) < _seconds(plan):
                plan = quick
        times = stage_times(plan.stages[0], graph, mesh, options) if plan.found else None
        return StagePlan(plan, times)

    def _stored(self, key: str, graph: Graph) -> StagePlan | None:
        """A plan from the store; a damaged entry counts as missing."""
        body = None if self._store is None else read_sealed(self._store, _store_key(key))
        if body is None:
            return None
        try:
            document = json.loads(body)
            plan = Plan.from_json(document["plan"])
            times = StageTimes.model_validate(document["times"])
        except (ValueError, LookupError, TypeError, PlanError):
            return None
        # The store is shared: its entry must be of this program and of these options.
        is_same = plan.id == key and plan.graph.digest == graph_digest(graph) and plan.found
        return StagePlan(plan, times) if is_same else None


def may_be_quick(options: PlanOptions) -> bool:
    """True if options leave open what is recomputed and gathered again, in training."""
    recomputing = options.memory.activation_checkpointing, options.memory.reshard_after_forward
    return options.mode == "training" and set(recomputing) == {"auto"}


def _with_own_bound(found: StagePlan) -> StagePlan:
    """A plan with the bound of its own certificate."""
    return found._replace(bound=found.plan.certificate.bound)


def _seconds(plan: Plan) -> float:
    return plan.costs.total if plan.costs else inf


def _store_key(key: str) -> str:
    return content_key(b"stage plan", key.encode())


def _with_names(plan: Plan, numbered: NumberedGraph, graph: Graph) -> Plan:
    """A plan of a numbered program with the names of the original one."""
    if not plan.found:
        return plan
    (stage,) = plan.stages
    values = {new: old for old, new in numbered.values.items()}
    nodes = {new: old for old, new in numbered.nodes.items()}
    memory = plan.memory
    if memory is not None:
        at = values.get(memory.at) or nodes.get(memory.at) or memory.at
        memory = memory.model_copy(update={"at": at})
    return plan.model_copy(
        update={"stages": (_renamed_stage(stage, values, nodes, graph),), "memory": memory}
    )


def _renamed_stage(
    stage: Stage, values: Mapping[str, str], nodes: Mapping[str, str], graph: Graph
) -> Stage:
    inputs = {i.name: i for i in graph.inputs}
    placed = []
    for one in stage.inputs:
        own = inputs[values[one.name]]
        update = {"name": own.name, "target": own.target, "aliases": own.aliases}
        placed.append(one.model_copy(update=update))
    return stage.model_copy(
        update={
            "program": graph_to_json(graph),
            "inputs": tuple(placed),
            "nodes": tuple(x.model_copy(update={"name": nodes[x.name]}) for x in stage.nodes),
            "reshardings": tuple(
                x.model_copy(
                    update={
                        "value": values[x.value],
                        "consumer": nodes.get(x.consumer, x.consumer) if x.consumer else None,
                    }
                )
                for x in stage.reshardings
            ),
            "outputs": tuple(
                x.model_copy(
                    update={
                        "name": values[x.name],
                        "updates": None if x.updates is None else values[x.updates],
                    }
                )
                for x in stage.outputs
            ),
            "checkpoints": tuple(
                x.model_copy(update={"first": nodes[x.first], "last": nodes[x.last]})
                for x in stage.checkpoints
            ),
        }
    )
