"""Tensors created from arguments, and random numbers.

A sharded random operator must draw different numbers on each shard: the runtime seeds generators by
shard (`OperatorSpec.draws`), so that replicas and terms of a sum agree, and shards differ.
"""

from functools import partial

from autoshard.graph import DType
from autoshard.ops.pointwise import pointwise
from autoshard.ops.rules.index_space import IndexSpace, replicated
from autoshard.ops.rules.rule import OperatorRule
from autoshard.ops.rules.spec import (
    NOTHING_SAVED,
    Call,
    Gradients,
    Kernel,
    OperatorSpec,
    SavedByAutograd,
    like,
    saves_everything,
)
from autoshard.ops.rules.strides import FullStrides, Shape


def _filled(call: Call) -> OperatorRule:
    """One value everywhere, or independent random numbers: any dim may be sharded.

    An input that only gives its dtype or shape is sharded like the output if shapes agree.
    """
    shape = call.outputs[0].shape
    space = IndexSpace(call)
    dims = space.free_dims(shape)
    inputs = [
        dims if tensor.shape == shape else space.fixed_dims(tensor.shape) for tensor in call.inputs
    ]
    return space.rule(inputs, [dims])


def _multinomial(call: Call) -> OperatorRule:
    """A distribution per row."""
    *rows, values = call.inputs[0].shape
    space = IndexSpace(call)
    dims = space.free_dims(rows)
    drawn = space.fixed(call.outputs[0].shape[-1])
    return space.rule([(*dims, space.fixed(values))], [(*dims, drawn)])


def _keeps_all(call: Call, _: int = 0) -> bool:
    """True if a dropout returns its input."""
    return not call.flag("train") or call.number("p", 0.5) == 0


def _dropout_strides(call: Call, _: Shape, strides: FullStrides, __: Shape) -> FullStrides | None:
    return strides if _keeps_all(call) else None


def _dropout_saves(call: Call, _: Gradients) -> SavedByAutograd:
    """The mask, a byte per element."""
    if _keeps_all(call):
        return NOTHING_SAVED
    return SavedByAutograd(extras=(like(call, 0, DType.BOOL.itemsize),))


_COUNTED = (
    "Values count from the start of the tensor. Nothing is lost: they are small, and sharding a "
    "replicated tensor is free."
)
_DRAWN_WHOLE = "Numbers are drawn for the whole tensor, or exports hardly contain the operator."

SPECS = (
    OperatorSpec(
        """
            zeros.default ones.default full.default empty.memory_format new_zeros.default
            new_ones.default new_full.default new_empty.default
        """,
        _filled,
        saves="",
        kernel=Kernel.RESIZE,
        kernel_argument="size",
        examples="""
            size=(b,s) -> [b,s]
            new_ones.default: self[b,s] size=(b,s) -> [b,s]
        """,
    ),
    OperatorSpec(
        """
            full_like.default zeros_like.default ones_like.default empty_like.default
            scalar_tensor.default
        """,
        _filled,
        saves="",
        examples="self[b,s] fill_value=1.0 -> [b,s]",
    ),
    OperatorSpec("arange linspace eye", replicated, saves="", unsharded=_COUNTED),
    OperatorSpec(
        "rand.default randn.default randint.default randint.low normal.float_float",
        _filled,
        saves="",
        kernel=Kernel.RESIZE,
        kernel_argument="size",
        draws="",
        examples="size=(b,s) -> [b,s]",
    ),
    OperatorSpec(
        """
            bernoulli.p bernoulli.default binomial.default exponential.default normal_functional
            normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor poisson.default
            rand_like.default randint_like.default randint_like.low_dtype randn_like.default
            uniform.default
        """,
        pointwise,
        saves="",
        draws="",
        examples="self[b,s] p=0.5 -> [b,s]",
    ),
    OperatorSpec(
        "dropout.default",
        partial(pointwise, linear=({0},)),
        saves=_dropout_saves,
        strides=_dropout_strides,
        passes_gradient=_keeps_all,
        draws="p",
        examples="input[b,s,h] p=0.1 train=True -> [b,s,h]",
    ),
    OperatorSpec("native_dropout", partial(pointwise, linear=({0},)), saves="out1", draws="p"),
    OperatorSpec(
        "multinomial.default",
        _multinomial,
        saves="",
        draws="",
        examples="self[b,v] num_samples=1 -> :int64[b,1]",
    ),
    OperatorSpec(
        "lstm.data gru.data randperm alpha_dropout rrelu",
        replicated,
        saves=saves_everything,
        draws="",
        unsharded=_DRAWN_WHOLE,
    ),
    OperatorSpec(
        """
            _cudnn_attention_backward _cudnn_attention_forward _cudnn_init_dropout_state
            _cudnn_rnn _efficient_attention_forward _flash_attention_forward
            _flash_attention_forward_no_dropout_inplace _fused_dropout _fused_sdp_choice
            _lstm_mps _nested_tensor_softmax_with_shape _sample_dirichlet
            _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
            _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
            _scaled_dot_product_efficient_attention_backward
            _scaled_dot_product_fused_attention_overrideable _standard_gamma
            _triton_scaled_dot_attention bernoulli binomial cauchy exponential
            feature_alpha_dropout feature_dropout geometric log_normal miopen_rnn normal poisson
            rand rand_like randint randint_like randn randn_like random rnn_relu rnn_tanh
            rrelu_with_noise rrelu_with_noise_functional uniform
        """,
        replicated,
        saves=saves_everything,
        draws="",
    ),
)
