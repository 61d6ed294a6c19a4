"""What reshardings are charged of collectives that they share, or that compute hides.

Reshardings of small parameters are priced as a share of a full bucket: the actual members are only
known once there is a plan, and the price of a layer should not depend on other layers.

Frameworks that split a product of weights into parts exchange the activations of one part while
they compute the next (Transformer Engine's userbuffers; Wang and others, "Overlap communication
with dependent computation via decomposition", 2023). So do rings of attention over parts of a
sequence. Collectives of what such products read or make are charged what is not hidden.
"""

from collections.abc import Iterator, Mapping

from autoshard.costs import Category, categorise
from autoshard.graph import Graph, Node
from autoshard.layouts import Charge
from autoshard.lowering import buckets
from autoshard.mesh import Mesh
from autoshard.ops import call_of, is_view, rule_for, weights_of
from autoshard.plan.options import PlanOptions


def charges(graph: Graph, mesh: Mesh, options: PlanOptions) -> Mapping[str, Charge]:
    """The charges of values whose reshardings do not pay for whole collectives.

    Args:
        graph: the program.
        mesh: the devices; if its collectives are tabulated, they are per tensor, not per bucket.
        options: of the plan.
    """
    found = bucket_charges(graph, mesh, options.runtime.bucket_bytes)
    if options.runtime.activation_overlap:
        charge = Charge(exposed=1 - options.runtime.activation_overlap)
        found |= dict.fromkeys(_beside_products(graph), charge)
    return found


def bucket_charges(graph: Graph, mesh: Mesh, bucket_bytes: int | None = None) -> dict[str, Charge]:
    """The charge of each parameter that shares a bucket.

    Args:
        graph: the program.
        mesh: the devices.
        bucket_bytes: bytes of the full parameters of a bucket, which all smaller parameters share;
            None for `buckets.LARGEST`, which those of up to `buckets.SMALL` bytes share.
    """
    if mesh.collectives is not None:
        return {}
    tensors = {parameter.name: graph.values[parameter.name] for parameter in graph.parameters}
    most, full = buckets.SMALL, buckets.LARGEST
    if bucket_bytes is not None:
        most = full = min(bucket_bytes, sum(tensor.nbytes for tensor in tensors.values()))
    return {name: Charge(full / t.nbytes) for name, t in tensors.items() if 0 < t.nbytes <= most}


def _beside_products(graph: Graph) -> Iterator[str]:
    """Activations that a contraction makes or reads, or views of them."""
    weights = weights_of(graph)
    views: dict[str, str] = {}
    for node in graph.nodes:
        if is_view(node.operator) and node.inputs:
            views |= dict.fromkeys(node.outputs, views.get(node.inputs[0], node.inputs[0]))
    found = {
        views.get(value, value)
        for node in graph.nodes
        if _is_contraction(graph, node)
        for value in (*node.inputs, *node.outputs)
        if value not in weights
    }
    yield from found
    yield from (view for view, origin in views.items() if origin in found)


def _is_contraction(graph: Graph, node: Node) -> bool:
    call = call_of(graph, node)
    kind = categorise(rule_for(call), call.inputs, is_view=is_view(node.operator))
    return kind is Category.CONTRACTION
