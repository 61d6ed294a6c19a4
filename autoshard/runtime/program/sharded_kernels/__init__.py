"""Kernels of operators whose ranks communicate: `OperatorRule.reduced` and `OperatorRule.halo`.

Each kernel is an autograd function. It communicates only the statistics or edges that the rule
lists, and saves the same tensors for backward as the unsharded operator.
"""

from collections.abc import Callable, Mapping

from autoshard.ops.rules.windows import INTERPOLATIONS, RANKS
from autoshard.runtime.program.local_node import LocalKernel, LocalNode
from autoshard.runtime.program.sharded_kernels.attention import bind_attention
from autoshard.runtime.program.sharded_kernels.halo import (
    bind_convolution,
    bind_interpolation,
    bind_pool,
)
from autoshard.runtime.program.sharded_kernels.losses import bind_cross_entropy, bind_nll_loss
from autoshard.runtime.program.sharded_kernels.norms import (
    bind_batch_norm,
    bind_group_norm,
    bind_last_dims,
)
from autoshard.runtime.program.sharded_kernels.reductions import (
    bind_arg_extreme,
    bind_reduction,
    bind_softmax,
)

__all__ = ["bind_sharded_kernel"]

_BINDERS: Mapping[str, Callable[[LocalNode], LocalKernel | None]] = {
    "cross_entropy_loss": bind_cross_entropy,
    "layer_norm": bind_last_dims,
    "rms_norm": bind_last_dims,
    "group_norm": bind_group_norm,
    "batch_norm": bind_batch_norm,
    "scaled_dot_product_attention": bind_attention,
    **dict.fromkeys(("softmax", "log_softmax"), bind_softmax),
    **dict.fromkeys(("nll_loss", "nll_loss_nd", "nll_loss2d"), bind_nll_loss),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), bind_arg_extreme),
    **dict.fromkeys(
        ("amax", "amin", "var", "std", "linalg_vector_norm", "logsumexp"), bind_reduction
    ),
    **{f"conv{rank}d": bind_convolution for rank in RANKS},
    **{f"conv_transpose{rank}d": bind_convolution for rank in RANKS},
    **{f"max_pool{rank}d": bind_pool for rank in RANKS},
    **{f"avg_pool{rank}d": bind_pool for rank in RANKS},
    **{f"upsample_{name}": bind_interpolation for name in INTERPOLATIONS},
}
"""Binders by ATen operator name without overload."""


def bind_sharded_kernel(local: LocalNode) -> LocalKernel | None:
    """The kernel of an operator along sharded dims; None if the plan does not shard these dims."""
    return _BINDERS[local.node.operator.split(".")[1]](local)
