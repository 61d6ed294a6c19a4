"""Throughput of a plan: samples and tokens per second, and model FLOPs utilisation (MFU)."""

from dataclasses import dataclass
from math import prod

from autoshard.costs import Category, categorise
from autoshard.graph import DType, Graph, Node, graph_from_json
from autoshard.ops import call_of, is_view, rule_for
from autoshard.plan.document import Plan

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
    placed = next((i for i in stage.inputs if i.kind == "user" and i.shape), None)
    if placed is None:
        return None
    is_tokens = len(placed.shape) == _TOKEN_DIMS and placed.dtype.startswith(("int", "uint"))
    samples = placed.shape[0] * stage.micro_batches
    return Batch(samples, placed.shape[1] if is_tokens else None)


def model_flops(plan: Plan) -> dict[str, float]:
    """Floating-point operations of all contractions of a step on all devices, by element type.

    Recomputation is not counted, and of causal attention only the positions that are computed.
    Backward of a contraction takes as many operations as forward for each of its factors that
    require a gradient, at most twice as many.
    """
    found: dict[str, float] = {}
    is_training = plan.options.mode == "training"
    for stage in plan.stages:
        graph = graph_from_json(stage.program)
        known: dict[int, tuple[str, float]] = {}
        for node, kind in zip(graph.nodes, graph.kinds, strict=True):
            if kind not in known:
                known[kind] = _contraction_flops(graph, node, is_training=is_training)
            dtype, flops = known[kind]
            if flops:
                found[dtype] = found.get(dtype, 0.0) + flops * stage.micro_batches
    return found


def utilisation(plan: Plan) -> float | None:
    """Model FLOPs utilisation: the share of the devices' peak that a step reaches.

    The peak is that of the element type of each contraction. None if there are no contractions.
    """
    assert plan.costs is not None
    device = plan.mesh.topology.device
    ideal = sum(flops / device.peak(dtype) for dtype, flops in model_flops(plan).items())
    if not ideal or not plan.costs.total:
        return None
    return ideal / (plan.costs.total * plan.mesh.num_devices)


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
