"""Operators that act as they do in training mode: dropout, and statistics of a batch."""

from autoshard.graph.ir import Graph, Node

_FLAGS = {
    "alpha_dropout": "train",
    "batch_norm": "training",
    "dropout": "train",
    "feature_alpha_dropout": "train",
    "feature_dropout": "train",
    "native_dropout": "train",
    "rrelu": "training",
    "rrelu_with_noise": "training",
}
"""The argument that `module.training` sets, by operator."""


def training_operators(graph: Graph) -> tuple[str, ...]:
    """Names of operators of the graph that a model in evaluation mode would run otherwise."""
    return tuple(sorted({_packet(node) for node in graph.nodes if _acts_in_training(node)}))


def _acts_in_training(node: Node) -> bool:
    packet = _packet(node)
    if packet == "scaled_dot_product_attention":
        return bool(node.argument("dropout_p", 0.0))
    if packet == "batch_norm" and node.argument("running_mean") is None:
        return False  # without running statistics those of the batch serve in both modes
    flag = _FLAGS.get(packet)
    return flag is not None and bool(node.argument(flag)) and node.argument("p", 1.0) != 0


def _packet(node: Node) -> str:
    return node.operator.split(".")[1]
