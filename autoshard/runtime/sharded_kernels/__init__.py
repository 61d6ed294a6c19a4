"""Operators along dims that are cut: `OperatorRule.reduced` and `OperatorRule.halo` in code.

Each is run as one function of autograd, with the statistics or the edges that its rule lists and
no other communication, and keeps for backward what the whole operator keeps.
"""

from collections.abc import Callable, Mapping

from autoshard.ops.windows import INTERPOLATIONS, RANKS
from autoshard.runtime.local_node import LocalKernel, LocalNode
from autoshard.runtime.sharded_kernels.attention import bind_attention
from autoshard.runtime.sharded_kernels.losses import bind_cross_entropy, bind_labels
from autoshard.runtime.sharded_kernels.norms import bind_batch_norm, bind_group_norm, bind_last_dims
from autoshard.runtime.sharded_kernels.reductions import (
    bind_amax,
    bind_first,
    bind_variance,
    bind_vector_norm,
)
from autoshard.runtime.sharded_kernels.resampling import bind_interpolation
from autoshard.runtime.sharded_kernels.softmax import bind_logsumexp, bind_softmax
from autoshard.runtime.sharded_kernels.windows import bind_avg_pool, bind_convolution, bind_max_pool

__all__ = ["bind_sharded_kernel"]

_BINDERS: Mapping[str, Callable[[LocalNode], LocalKernel | None]] = {
    "softmax": bind_softmax,
    "log_softmax": bind_softmax,
    "logsumexp": bind_logsumexp,
    "cross_entropy_loss": bind_cross_entropy,
    "nll_loss_nd": bind_labels,
    "nll_loss": bind_labels,
    "nll_loss2d": bind_labels,
    "layer_norm": bind_last_dims,
    "rms_norm": bind_last_dims,
    "group_norm": bind_group_norm,
    "batch_norm": bind_batch_norm,
    "amax": bind_amax,
    "amin": bind_amax,
    "max": bind_first,
    "min": bind_first,
    "argmax": bind_first,
    "argmin": bind_first,
    "var": bind_variance,
    "std": bind_variance,
    "linalg_vector_norm": bind_vector_norm,
    "scaled_dot_product_attention": bind_attention,
    **{f"conv{rank}d": bind_convolution for rank in RANKS},
    **{f"conv_transpose{rank}d": bind_convolution for rank in RANKS},
    **{f"max_pool{rank}d": bind_max_pool for rank in RANKS},
    **{f"avg_pool{rank}d": bind_avg_pool for rank in RANKS},
    **{f"upsample_{name}": bind_interpolation for name in INTERPOLATIONS},
}
"""By packet of ATen."""


def bind_sharded_kernel(local: LocalNode) -> LocalKernel | None:
    """What a rank runs where the dims that an operator works along are cut, else None."""
    return _BINDERS[local.node.operator.split(".")[1]](local)
