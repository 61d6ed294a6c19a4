"""What the table of operators says in words: what rules leave whole, and what no plan contains.

Keys are names of operators, or of packets, with spaces between them.
"""

from collections.abc import Mapping

UNCUT: Mapping[str, str] = {
    "arange linspace eye": "Values count from the start of the tensor. Nothing is lost: they are "
    "small, and taking a slice of what is whole is free.",
    "max.default min.default any all _is_all_true.default prod cumsum.default sort argsort "
    "topk.default fft_fftn.default unfold.default": "The dim that is worked along: slices give "
    "parts of an answer that no sum and no maximum puts together, or that models hardly ask for.",
    "cross_entropy_loss.default": "Positions under a mean over labels, which divides by what they "
    "count. Such a loss is therefore planned as a sum divided by a count.",
    "scaled_dot_product_attention.default": "Keys where some are dropped at random.",
    "conv1d conv2d conv3d max_pool2d.default avg_pool2d.default": "Places where a slice would lack "
    "more than the slices next to it have, where strides do not divide the image into as many "
    "places as there are windows (no padding, odd sizes), and, where windows overlap, slices of "
    "unequal length and of two axes.",
    "upsample_linear1d.vec upsample_bilinear2d.vec": "Places where an output size is given, or "
    "corners are aligned: scales are then no whole numbers.",
    "masked_scatter.default": "Which element comes next depends on all of the mask before.",
    "embedding_bag": "Rows and bags: bags are as long as the data says, and the tables of "
    "integers that come with a sum over rows are no sums.",
    "index_put.default scatter": "The dim that is written, and positions: of two writes to one "
    "place the last one counts.",
    "lstm.input gru.input": "Time and state: every step needs the whole state before it.",
    "lstm.data gru.data randperm alpha_dropout rrelu": "Numbers drawn for the whole at once, or "
    "operators that exports hardly contain.",
}
"""What rules leave whole, and why."""

GONE: Mapping[str, str] = {
    "_assert_tensor_metadata.default _assert_scalar.default _assert_async.default": "Dropped.",
    "_operator.getitem": "Outputs are values of their own.",
    "sym_size.int _operator.mul _operator.le _operator.ge _operator.eq torch.sym_ite": "Sizes are "
    "those of the example inputs.",
    "item.default": "Dropped where nothing uses the number; refused otherwise, because sizes "
    "would depend on the data.",
    "alias.default clone.default contiguous.default detach_.default to.device": "Dropped: memory "
    "formats do not matter, and all tensors of a rank are on its device.",
    "copy_.default": "What is copied, converted and expanded.",
    "broadcast_tensors.default": "One `expand` per tensor.",
    "wrap_with_set_grad_enabled": "Its body, behind a `detach`.",
    "wrap_with_autocast": "Its body where autocast is off; refused where it is on, since what is "
    "cast depends on the device.",
    "flex_attention": "Refused: its score function is a program of its own.",
    "flat_apply torch._functorch.predispatch._add_batch_dim "
    "torch._functorch.predispatch._remove_batch_dim "
    "torch._functorch.predispatch._vmap_increment_nesting "
    "torch._functorch.predispatch._vmap_decrement_nesting "
    "torch._functorch.predispatch.lazy_load_decompositions": "Cannot be run: calls of Python "
    "in the program, of `vmap` and of pytrees. Write the batched form.",
}
"""What exports contain and plans do not."""
