"""How a rank calls an operator on its local tensors: not always as the graph does."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autoshard.rules.random import DRAWING


class Kernel(StrEnum):
    """What differs from calling the operator with the graph's own arguments.

    `x` below is the operator's first tensor input, local; "the rank's shape" is the local
    shape of output 0 in the layout that the strategy gives it.
    """

    PLAIN = "plain"
    """Nothing."""
    RESIZE = "resize"
    """The argument named by `LocalKernel.argument` becomes the rank's shape."""
    RESHAPE = "reshape"
    """Runs `x.reshape(the rank's shape)` instead: the sizes and dims in the arguments of a
    reshape, a flatten or a squeeze describe the whole tensor."""
    VOCABULARY = "vocabulary"
    """An embedding with local rows [first, first + n) of the table, where `first` is the
    global row that the rank's slice starts at. Ids outside are looked up at row 0 and their
    output rows are zero, and so is their gradient; ids inside are lowered by `first`, and
    so is `padding_idx`, which is dropped where it lies outside. Plain where the table's
    rows are not cut."""
    SCALED = "scaled"
    """A mean: the result is multiplied by 1/n, where n is the product of the sizes of the
    axes on which a letter of the mean is cut (an input is a shard, output 0 is partial).
    Where `LocalKernel.argument` names a reduction argument, only if that is 1 (mean, and
    the default); otherwise plain."""
    SEEDED = "seeded"
    """Draws random numbers: ranks that differ only on axes that do not cut output 0 (they
    hold copies of a slice, or terms of its sum) draw the same ones, and ranks with
    different slices draw different ones. Plain where `LocalKernel.argument` names a
    probability that is 0."""


@dataclass(frozen=True, slots=True)
class LocalKernel:
    """The kernel of one operator.

    Attributes:
        kind: what differs.
        argument: schema name of the argument that the kind speaks of; empty for none.
    """

    kind: Kernel = Kernel.PLAIN
    argument: str = ""


_PLAIN = LocalKernel()
_RESHAPE = LocalKernel(Kernel.RESHAPE)
_RESIZE = LocalKernel(Kernel.RESIZE, "size")
_MEAN = LocalKernel(Kernel.SCALED)
_MEAN_LOSS = LocalKernel(Kernel.SCALED, "reduction")

KERNELS: Mapping[str, LocalKernel] = {
    "aten.reshape.default": _RESHAPE,
    "aten.view.default": _RESHAPE,
    "aten._unsafe_view.default": _RESHAPE,
    "aten.flatten.using_ints": _RESHAPE,
    "aten.unflatten.int": _RESHAPE,
    "aten.squeeze": _RESHAPE,
    "aten.unsqueeze.default": _RESHAPE,
    "aten.expand.default": _RESIZE,
    "aten.broadcast_to.default": _RESIZE,
    "aten.zeros.default": _RESIZE,
    "aten.ones.default": _RESIZE,
    "aten.full.default": _RESIZE,
    "aten.empty.memory_format": _RESIZE,
    "aten.new_zeros.default": _RESIZE,
    "aten.new_ones.default": _RESIZE,
    "aten.new_full.default": _RESIZE,
    "aten.new_empty.default": _RESIZE,
    "aten.embedding.default": LocalKernel(Kernel.VOCABULARY),
    "aten.mean": _MEAN,
    "aten.mse_loss.default": _MEAN_LOSS,
    "aten.l1_loss.default": _MEAN_LOSS,
    "aten.smooth_l1_loss.default": _MEAN_LOSS,
    "aten.huber_loss.default": _MEAN_LOSS,
    "aten.kl_div.default": _MEAN_LOSS,
    "aten.soft_margin_loss.default": _MEAN_LOSS,
    "aten.binary_cross_entropy.default": _MEAN_LOSS,
    "aten.binary_cross_entropy_with_logits.default": _MEAN_LOSS,
    "aten.dropout.default": LocalKernel(Kernel.SEEDED, "p"),
    "aten.scaled_dot_product_attention.default": LocalKernel(Kernel.SEEDED, "dropout_p"),
    **{f"aten.{packet}": LocalKernel(Kernel.SEEDED) for packet in DRAWING},
}
"""Kernels by operator, or by packet for all overloads; the rest are plain."""


def kernel_for(operator: str) -> LocalKernel:
    """How a rank calls an operator."""
    packet = operator.rpartition(".")[0]
    return KERNELS.get(operator) or KERNELS.get(packet) or _PLAIN
