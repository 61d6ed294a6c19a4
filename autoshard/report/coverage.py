"""Operator coverage: the operators of a graph that can be sharded, and the cost of the others."""

from collections.abc import Collection, Iterator

from pydantic import Field

from autoshard.errors import PlanError
from autoshard.graph import Graph, Node, graph_digest
from autoshard.ops import (
    Call,
    OperatorRule,
    axis_rules,
    call_of,
    has_rule,
    rule_for,
    spec_for,
)
from autoshard.plan.document import Plan
from autoshard.plan.predictions import Document, Seconds
from autoshard.plan.stage import Resharding

_SCALAR = "Tensors of at most one element: there is nothing to shard."


class OperatorUse(Document):
    """One operator in a graph.

    A call *falls back* if no axis can shard it: every rank then does all of its work.
    """

    operator: str
    has_rule: bool = Field(description="true if the library has a rule for it")
    found_rule: bool = Field(description="true if calls of it have a rule found by discovery")
    num_calls: int = Field(ge=1)
    num_whole: int = Field(ge=0, description="calls that fall back")
    reasons: tuple[str, ...] = Field(description="why calls fall back, each reason once")
    time: Seconds | None = Field(
        description="seconds of all calls, forward plus backward, with the collectives inside"
    )
    time_whole: Seconds | None = Field(description="seconds of the calls that fall back")
    time_around: Seconds | None = Field(
        description="seconds of the reshardings before and after those calls, without overlap"
    )


class Coverage(Document):
    """The operators of a graph, and what a plan pays for those that fall back."""

    operators: tuple[OperatorUse, ...] = Field(
        description="operators with calls that fall back first, then by time or frequency"
    )
    total: Seconds | None = Field(
        description="predicted time of a step; of a pipeline, the sum over its stages, although "
        "they run at the same time; null without a plan"
    )

    @property
    def num_calls(self) -> int:
        """Number of calls of all operators."""
        return sum(use.num_calls for use in self.operators)

    @property
    def num_whole(self) -> int:
        """Number of calls that fall back."""
        return sum(use.num_whole for use in self.operators)

    @property
    def share_whole(self) -> float | None:
        """Share of a step's time in calls that fall back; None without a plan."""
        return self._share(use.time_whole for use in self.operators)

    @property
    def share_around(self) -> float | None:
        """Share of a step's time in reshardings around them; None without a plan."""
        return self._share(use.time_around for use in self.operators)

    def _share(self, times: Iterator[float | None]) -> float | None:
        if self.total is None:
            return None
        return sum(time or 0.0 for time in times) / self.total if self.total else 0.0


def operator_coverage(
    graph: Graph, plan: Plan | None = None, *, axis_sizes: Collection[int] = ()
) -> Coverage:
    """The operators of a graph, and which of their calls can be sharded.

    Args:
        graph: the program.
        plan: a plan for it. With a plan, a call falls back if no axis of the plan's mesh can
            shard it, and times are known; without one, if no axis of any size can.
        axis_sizes: without a plan, sizes of mesh axes, each at least 2; a call then falls back
            if no axis of one of these sizes can shard it.

    Raises:
        PlanError: the plan is for another graph, or the document has no plan.
    """
    if plan is None:
        return _Survey(graph, axis_sizes=axis_sizes).coverage(None)
    if graph_digest(graph) != plan.graph.digest:
        raise PlanError("the plan was made for another graph")
    if not plan.found:
        raise PlanError(f"the document has no plan to take times from: {plan.reason}")
    sizes = {size for stage in plan.stages for _, size in stage.axes if size > 1}
    return _Survey(graph, axis_sizes=sizes).coverage(plan)


class _Survey:
    """The calls of a graph, with the reasons of those that fall back.

    Args:
        graph: the program.
        axis_sizes: sizes of the mesh axes; any size if empty.
    """

    def __init__(self, graph: Graph, *, axis_sizes: Collection[int]) -> None:
        self._graph = graph
        self._axis_sizes = axis_sizes
        known: dict[int, str] = {}
        for node, kind in zip(graph.nodes, graph.kinds, strict=True):
            if kind not in known:
                known[kind] = self._reason(call_of(graph, node))
        self._reasons = {
            node.name: known[kind] for node, kind in zip(graph.nodes, graph.kinds, strict=True)
        }

    def coverage(self, plan: Plan | None) -> Coverage:
        """The result, with times if there is a plan."""
        calls: dict[str, list[Node]] = {}
        for node in self._graph.nodes:
            calls.setdefault(node.operator, []).append(node)
        times: dict[str, float] | None = None
        around: dict[str, float] = {}
        if plan is not None:
            times = dict.fromkeys(self._graph.numbers, 0.0)
            for placed in (node for stage in plan.stages for node in stage.nodes):
                times[placed.name] += placed.time + placed.communication
            around = self._around([c for stage in plan.stages for c in stage.reshardings])
        uses = [self._use(name, nodes, times, around) for name, nodes in calls.items()]
        return Coverage(
            operators=tuple(sorted(uses, key=_weight, reverse=True)),
            total=None if plan is None else _total(plan),
        )

    def _use(
        self,
        operator: str,
        nodes: list[Node],
        times: dict[str, float] | None,
        around: dict[str, float],
    ) -> OperatorUse:
        whole = [node for node in nodes if self._reasons[node.name]]
        return OperatorUse(
            operator=operator,
            has_rule=has_rule(operator),
            found_rule=any(self._graph.rule_of(node) is not None for node in nodes),
            num_calls=len(nodes),
            num_whole=len(whole),
            reasons=tuple(dict.fromkeys(self._reasons[node.name] for node in whole)),
            time=None if times is None else sum(times[node.name] for node in nodes),
            time_whole=None if times is None else sum(times[node.name] for node in whole),
            time_around=None if times is None else sum(around.get(n.name, 0.0) for n in whole),
        )

    def _around(self, reshardings: Collection[Resharding]) -> dict[str, float]:
        """Seconds of reshardings by the call that needs them: the consumer or the producer."""
        found: dict[str, float] = {}
        for resharding in reshardings:
            maker = self._graph.makers.get(resharding.value)
            ends = (resharding.consumer, None if maker is None else self._graph.nodes[maker].name)
            for end in ends:
                if end is not None and self._reasons.get(end):
                    # The overlapped time may be longer, since it includes the re-gather.
                    seen = max(resharding.time - resharding.overlapped, 0.0)
                    found[end] = found.get(end, 0.0) + seen
                    break
        return found

    def _reason(self, call: Call) -> str:
        """The reason why a call falls back; empty if it does not."""
        rule = rule_for(call)
        if self._can_shard(rule, self._axis_sizes):
            return ""
        if not has_rule(call.operator) and call.custom_rule is None:
            return "It has no rule."
        if all(tensor.numel <= 1 for tensor in (*call.inputs, *call.outputs)):
            return _SCALAR
        if self._can_shard(rule, ()):
            sizes = " or ".join(map(str, sorted(self._axis_sizes)))
            return f"No size that may be sharded divides into {sizes} slices."
        return spec_for(call.operator).unsharded or "No dim of this call can be sharded."

    @staticmethod
    def _can_shard(rule: OperatorRule, axis_sizes: Collection[int]) -> bool:
        """True if an axis of one of these sizes (any size if empty) can shard an index letter."""
        sizes = axis_sizes or {size for size in rule.sizes.values() if size > 1}
        return any(option.letter for size in sizes for option in axis_rules(rule, size))


def _total(plan: Plan) -> float:
    if plan.pipeline is not None:
        return sum(summary.costs.total for summary in plan.pipeline.stages)
    assert plan.costs is not None
    return plan.costs.total


def _weight(use: OperatorUse) -> tuple[bool, float, float, int]:
    return use.num_whole > 0, use.time_whole or 0.0, use.time or 0.0, use.num_calls
