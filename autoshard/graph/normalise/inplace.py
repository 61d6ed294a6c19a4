"""Operators that write into their first input, and what they are without writing.

PyTorch generates the writing form of an operator from the plain one, under its name with an
underscore behind and with the same arguments. Only the exceptions are listed here.
"""

from functools import lru_cache

from autoshard.errors import UnsupportedError
from autoshard.graph.ir import Node

_WITHOUT_PLAIN_FORM = frozenset(
    {
        *("as_strided_", "resize_", "resize_as_", "set_", "rename_", "requires_grad_"),
        *("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
        *("eq_", "ge_", "gt_", "le_", "lt_", "ne_", "not_equal_"),
        *("greater_", "greater_equal_", "less_", "less_equal_"),
        *("logical_and_", "logical_not_", "logical_or_", "logical_xor_"),
        *("cauchy_", "geometric_", "log_normal_", "random_"),
    }
)
"""They change the shape of a value, keep an element type that the plain form changes, or
draw numbers with arguments that the plain form orders differently."""

_WITHOUT_PROMOTION = frozenset(
    {
        *("addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_", "index_add_", "index_copy_"),
        *("index_fill_", "index_put_", "index_reduce_", "masked_fill_", "masked_scatter_", "put_"),
        *("scatter_", "scatter_add_", "scatter_reduce_"),
    }
)
"""Their plain form has the element type of the first input, whatever the others have."""

_RANDOM = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
}

OVERWRITES: dict[str, str | None] = {
    "aten.copy_.default": "src",
    "aten.fill_.Scalar": "value",
    "aten.fill_.Tensor": "value",
    "aten.zero_.default": None,
}
"""Operators that replace all contents, by the argument that holds the new ones."""


@lru_cache(maxsize=1 << 12)
def is_inplace(operator: str) -> bool:
    """Whether the name is that of an operator that writes into its first input."""
    packet = _packet(operator)
    return packet.endswith("_") and not packet.endswith("__")


def promotes(operator: str) -> bool:
    """Whether the plain form has the wider type of its inputs, not that of the first."""
    return _packet(operator) not in _WITHOUT_PROMOTION


def plain_form(node: Node) -> str:
    """The operator that returns what the node's operator writes.

    Raises:
        UnsupportedError: there is none with the same arguments.
    """
    if node.operator in _RANDOM:
        return _RANDOM[node.operator]
    namespace, packet, *overload = node.operator.split(".")
    if namespace == "aten" and packet not in _WITHOUT_PLAIN_FORM:
        return ".".join([namespace, packet[:-1], *overload])
    raise UnsupportedError(
        f"node {node.name!r}: {node.operator} changes its input in a way that has no plain form; "
        "write the model without it"
    )


def _packet(operator: str) -> str:
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else ""
