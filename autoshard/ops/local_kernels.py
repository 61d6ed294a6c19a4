"""How a rank calls an operator on its local tensors: not always as the graph does."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autoshard.graph.experts import EXPERT_OPERATORS
from autoshard.ops.random import DRAWING, FILLING_AT_RANDOM, SIZED_AT_RANDOM
from autoshard.ops.windows import INTERPOLATIONS, RANKS


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
    REPEAT = "repeat"
    """The argument named by `LocalKernel.argument` becomes the number of times that each dim
    of `x` fits into the rank's shape."""
    SPLIT = "split"
    """Pieces of a dim are as long as they are on the rank."""
    RUN = "run"
    """A run of a dim starts where its piece starts on the rank, and is as long as that."""
    GROUPS = "groups"
    """The argument named by `LocalKernel.argument` counts groups of the channels in dim 1 of
    the whole `x`; it becomes the rank's share of it, and at least 1."""
    VOCABULARY = "vocabulary"
    """An embedding with local rows [first, first + n) of the table, where `first` is the
    global row that the rank's slice starts at. Ids outside are looked up at row 0 and their
    output rows are zero, and so is their gradient; ids inside are lowered by `first`, and
    so is `padding_idx`, which is dropped where it lies outside. Plain where the table's
    rows are not cut."""
    BAGS = "bags"
    """Outputs beside the first are tables of integers that only backward reads, on a form that
    differs between devices. One of another shape than planned becomes zeros of that shape."""
    COUNTS = "counts"
    """Integers are counted as numbers of double precision where the device counts no others:
    a program that was exported for another device may count integers."""
    EXPERTS = "experts"
    """A grouped product with a slice of the rows, of the matrices, or both. The ends of all
    groups become those of the local matrices, counted within the local rows. Rows of other
    matrices give zero, and their gradient is zero; they are moved behind the last group,
    where they cost nothing."""
    ROUTED = "routed"
    """An operator of `autoshard.graph.experts`. Local rows are one tensor [1, n, d], ordered by
    expert and then by token, and how many there are follows from the ids."""
    DIAGONAL = "diagonal"
    """The argument named by `LocalKernel.argument`, a diagonal of the last two dims, becomes that
    of the rank's rows and columns."""
    ATTENTION = "attention"
    """As `SHARDED_DIM` where the keys are cut. If the flag named by `LocalKernel.argument` is set,
    the rank's queries see the keys up to their own place in the whole sequence, and later keys are
    left out. Otherwise plain."""
    SCALED = "scaled"
    """A mean: the result is multiplied by the rank's share of what is averaged, which is 1/n
    where n ranks have equal slices. A letter of the mean is cut on the axes on which an input is
    a shard and output 0 is partial.
    Where `LocalKernel.argument` names a reduction argument, only if that is 1 (mean, and
    the default); otherwise plain."""
    SHARDED_DIM = "sharded_dim"
    """Where the dims that the operator works along are cut, ranks put their statistics together
    as `OperatorRule.reduced` says, or exchange edges as `OperatorRule.halo` does. Otherwise plain,
    or `GROUPS` where `LocalKernel.argument` names an argument."""
    CLASSES = "classes"
    """As `SHARDED_DIM` where the classes of a loss are cut, and as `SCALED` besides."""


@dataclass(frozen=True, slots=True)
class LocalKernel:
    """The kernel of one operator.

    Attributes:
        kind: what differs.
        argument: schema name of the argument that the kind speaks of; empty for none.
        draws: whether the operator draws random numbers: None if it never does, the schema
            name of a probability if it does where that is not 0, empty if it always does.
            Ranks that differ only on axes that do not cut output 0 (they hold copies of a
            slice, or terms of its sum) draw the same ones, and ranks with different slices
            draw different ones.
    """

    kind: Kernel = Kernel.PLAIN
    argument: str = ""
    draws: str | None = None


_PLAIN = LocalKernel()
_RESHAPE = LocalKernel(Kernel.RESHAPE)
_RESIZE = LocalKernel(Kernel.RESIZE, "size")
_SPLIT = LocalKernel(Kernel.SPLIT)
_CONVOLUTION = LocalKernel(Kernel.SHARDED_DIM, "groups")
_ROUTED = LocalKernel(Kernel.ROUTED)
_EXPERTS = LocalKernel(Kernel.EXPERTS, "offs")
_MEAN = LocalKernel(Kernel.SCALED)
_MEAN_LOSS = LocalKernel(Kernel.SCALED, "reduction")
_SHARDED_DIM = LocalKernel(Kernel.SHARDED_DIM)

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
    "aten.cross_entropy_loss.default": LocalKernel(Kernel.CLASSES, "reduction"),
    "aten.soft_margin_loss.default": _MEAN_LOSS,
    "aten.binary_cross_entropy.default": _MEAN_LOSS,
    "aten.binary_cross_entropy_with_logits.default": _MEAN_LOSS,
    **{f"aten.adaptive_avg_pool{rank}d.default": _MEAN for rank in RANKS},
    **{
        f"aten.{kind}_pool{rank}d.default": _SHARDED_DIM
        for kind in ("max", "avg")
        for rank in RANKS
    },
    **{f"aten.upsample_{name}.vec": _SHARDED_DIM for name in INTERPOLATIONS},
    **{f"aten.conv{rank}d": _CONVOLUTION for rank in RANKS},
    "aten.conv_transpose1d.default": _CONVOLUTION,
    "aten.conv_transpose2d.input": _CONVOLUTION,
    "aten.conv_transpose3d.input": _CONVOLUTION,
    "aten.group_norm.default": LocalKernel(Kernel.SHARDED_DIM, "num_groups"),
    **{
        f"aten.{operator}": _SHARDED_DIM
        for operator in (
            *("layer_norm.default", "rms_norm.default", "batch_norm.default"),
            *("softmax.int", "log_softmax.int", "logsumexp", "linalg_vector_norm", "var", "std"),
            *("amax", "amin", "argmax", "argmin", "max.dim", "min.dim"),
            *("nll_loss_nd.default", "nll_loss.default", "nll_loss2d.default"),
        )
    },
    "aten.repeat.default": LocalKernel(Kernel.REPEAT, "repeats"),
    "aten.tril.default": LocalKernel(Kernel.DIAGONAL, "diagonal"),
    "aten.triu.default": LocalKernel(Kernel.DIAGONAL, "diagonal"),
    "aten.split": _SPLIT,
    "aten.split_with_sizes.default": _SPLIT,
    "aten.chunk.default": _SPLIT,
    "aten.slice.Tensor": LocalKernel(Kernel.RUN),
    "aten.narrow.default": LocalKernel(Kernel.RUN),
    "aten.embedding_bag": LocalKernel(Kernel.BAGS),
    "aten.histc.default": LocalKernel(Kernel.COUNTS),
    "aten._grouped_mm.default": _EXPERTS,
    "transformers.grouped_mm_fallback.default": _EXPERTS,
    **dict.fromkeys(EXPERT_OPERATORS, _ROUTED),
    **{f"aten.{packet}": LocalKernel(draws="") for packet in (*DRAWING, *FILLING_AT_RANDOM)},
    **{f"aten.{operator}": LocalKernel(Kernel.RESIZE, "size", "") for operator in SIZED_AT_RANDOM},
    "aten.dropout.default": LocalKernel(draws="p"),
    "aten.native_dropout": LocalKernel(draws="p"),
    "aten.multinomial.default": LocalKernel(draws=""),
    "aten.scaled_dot_product_attention.default": LocalKernel(
        Kernel.ATTENTION, "is_causal", draws="dropout_p"
    ),
    "aten.lstm": LocalKernel(draws="dropout"),
    "aten.gru": LocalKernel(draws="dropout"),
}
"""Kernels by operator, or by packet for all overloads; the rest are plain."""


def kernel_for(operator: str) -> LocalKernel:
    """How a rank calls an operator."""
    packet = operator.rpartition(".")[0]
    return KERNELS.get(operator) or KERNELS.get(packet) or _PLAIN
