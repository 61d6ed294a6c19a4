"""Throughput of a plan: samples and tokens per second, and model FLOPs utilisation (MFU).

MFU is that of Chowdhery et al., "PaLM", 2022: what backward computes again is no work of the model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from autoshard.costs import Category, categorise
from autoshard.graph import DType, Graph, InputKind, Node, graph_from_json
from autoshard.graph.experts import GROUPED_MM
from autoshard.mesh import Mesh
from autoshard.ops import call_of, is_view, rule_for
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions

_TOKEN_DIMS = 2
"""Dims of an integer input whose elements are tokens: batch and sequence."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of a step.

    Attributes:
        samples: number of samples, in all micro-batches.
        sequence: tokens of a sample; None if the model does not take tokens.
    """

    samples: int
    sequence: int | None

    @property
    def tokens(self) -> int | None:
        """Number of tokens of a step; None if the model does not take tokens."""
        return None if self.sequence is None else self.samples * self.sequence


def batch_of(plan: Plan) -> Batch | None:
    """The batch of a step, from the first input with dims; None if there is none.

    Args:
        plan: a plan with stages.
    """
    stage = plan.stages[0]
    inputs = ((i.shape, i.dtype) for i in stage.inputs if i.kind == "user")
    return _first_batch(inputs, stage.micro_batches)


def _batch(graph: Graph, options: PlanOptions) -> Batch | None:
    values = (graph.values[i.name] for i in graph.inputs if i.kind is InputKind.USER)
    inputs = ((value.shape, value.dtype.value) for value in values)
    return _first_batch(inputs, options.training.micro_batches)


def _first_batch(inputs: Iterable[tuple[tuple[int, ...], str]], micro_batches: int) -> Batch | None:
    """The batch that the first input with dims has, by shape and element type."""
    shape, dtype = next(((shape, dtype) for shape, dtype in inputs if shape), ((), ""))
    if not shape:
        return None
    is_tokens = len(shape) == _TOKEN_DIMS and dtype.startswith(("int", "uint"))
    return Batch(shape[0] * micro_batches, shape[1] if is_tokens else None)


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step on all devices.

    Attributes:
        batch: the input; None if no input has dims.
        flops: floating-point operations of all contractions, by element type. Recomputation is not
            counted, and of causal attention only the positions that are computed. Backward of a
            contraction takes as many operations as forward for each of its factors that require a
            gradient, at most twice as many.
        has_experts: True for a mixture of experts.
    """

    batch: Batch | None
    flops: Mapping[str, float]
    has_experts: bool


def plan_work(plan: Plan) -> StepWork:
    """The work of a step of a plan with stages."""
    programs = [(graph_from_json(stage.program), stage.micro_batches) for stage in plan.stages]
    return _work(batch_of(plan), programs, plan.options)


def program_work(graph: Graph, options: PlanOptions) -> StepWork:
    """The work of a step of a program, of all micro-batches."""
    return _work(_batch(graph, options), [(graph, options.training.micro_batches)], options)


def utilisation(work: StepWork, mesh: Mesh, seconds: float) -> float | None:
    """Model FLOPs utilisation: the share of the devices' peak that a step reaches.

    The peak is that of the element type of each contraction. None if there are no contractions.

    Args:
        work: of the step.
        mesh: the devices.
        seconds: of the step.
    """
    device = mesh.topology.device
    ideal = sum(flops / device.peak(dtype) for dtype, flops in work.flops.items())
    return ideal / (seconds * mesh.num_devices) if ideal and seconds else None


def _work(
    batch: Batch | None, programs: Iterable[tuple[Graph, int]], options: PlanOptions
) -> StepWork:
    found: dict[str, float] = {}
    has_experts = False
    for graph, micro_batches in programs:
        known: dict[int, tuple[str, float]] = {}
        for node, kind in zip(graph.nodes, graph.kinds, strict=True):
            if kind not in known:
                known[kind] = _contraction_flops(
                    graph, node, is_training=options.mode == "training"
                )
                has_experts |= node.operator == GROUPED_MM
            dtype, flops = known[kind]
            if flops:
                found[dtype] = found.get(dtype, 0.0) + flops * micro_batches
    return StepWork(batch, found, has_experts)


def _contraction_flops(graph: Graph, node: Node, *, is_training: bool) -> tuple[str, float]:
    call = call_of(graph, node)
    rule = rule_for(call)
    if categorise(rule, call.inputs, is_view=is_view(node.operator)) is not Category.CONTRACTION:
        return "", 0.0
    flops = rule.flops_per_point * prod(rule.sizes.values())
    if rule.causal is not None:
        rows, columns = (rule.sizes[letter] for letter in rule.causal)
        seen = sum(min(row + 1, columns) for row in range(rows))
        flops *= seen / (rows * columns)
    floating = [tensor for tensor in call.inputs if tensor.dtype.is_differentiable]
    widest = max((t.dtype for t in floating), key=lambda d: d.itemsize, default=DType.FLOAT32)
    trained = sum(t.requires_grad and len(t.shape) > 1 for t in floating) if is_training else 0
    return widest.value, flops * (1 + min(trained, 2))
