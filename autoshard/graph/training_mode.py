"""Modules whose operators act as in training mode: dropout, and statistics of a batch."""

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


def training_modules(graph: Graph) -> dict[str, bool]:
    """The modules with such operators, by name: True if one acts as in training mode."""
    found: dict[str, bool] = {}
    for node in graph.nodes:
        acts = _acts_in_training(node)
        if acts is not None:
            found[node.module] = found.get(node.module, False) or acts
    return found


def _acts_in_training(node: Node) -> bool | None:
    """True if an operator acts as in training mode; None if it has no modes."""
    packet = _packet(node)
    if packet == "scaled_dot_product_attention":
        return True if node.argument("dropout_p", 0.0) else None
    if packet == "batch_norm" and node.argument("running_mean") is None:
        return None  # without running statistics those of the batch serve in both modes
    flag = _FLAGS.get(packet)
    if flag is None or node.argument("p", 1.0) == 0:
        return None
    return bool(node.argument(flag))


def _packet(node: Node) -> str:
    return node.operator.split(".")[1]
