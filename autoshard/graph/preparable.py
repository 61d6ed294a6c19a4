"""Operators that make the same in every step, and on every rank."""

from autoshard.graph.ir import Node

FILLING = frozenset({"full", "ones", "scalar_tensor", "zeros"})
MAKING = FILLING | {"arange", "eye", "linspace", "logspace", "tril_indices", "triu_indices"}
"""Packets that make a tensor of nothing but their arguments."""

FOLLOWING = frozenset(
    """
    __and__ __or__ __xor__ abs add all amax amin any argmax argmin bitwise_and bitwise_not
    bitwise_or bitwise_xor broadcast_tensors broadcast_to bucketize cat ceil chunk clamp clamp_max
    clamp_min constant_pad_nd cos cumprod cumsum detach diagonal diff div einsum eq exp expand
    fill flip floor floor_divide fmod full_like gather ge gt index index_put index_select isin
    isinf isnan le log log10 log1p log2 logical_and logical_not logical_or logical_xor lt
    masked_fill max maximum mean meshgrid min minimum movedim mul narrow ne neg new_full new_ones
    new_zeros one_hot ones_like pad permute pow reciprocal remainder repeat repeat_interleave
    reshape roll round rsqrt rsub scatter select select_scatter sign sin slice slice_scatter split
    split_with_sizes sqrt squeeze stack sub sum t tanh to transpose tril triu trunc unbind unfold
    unsqueeze where zeros_like
    """.split()  # noqa: SIM905  a table of words
)
"""Packets that make the same of the same tensors; what is not here stays in the step."""


def may_prepare(node: Node) -> bool:
    """Whether a call whose inputs are the same in every step makes the same in every step."""
    namespace, packet = node.operator.split(".")[:2]
    return namespace == "aten" and packet in (FOLLOWING if node.inputs else MAKING)
