"""Random operators: they are right on slices only if each slice draws its own numbers.

The runtime seeds by the slice (`LocalKernel.draws`), so that copies and terms of a sum
agree, and slices differ.
"""

from collections.abc import Mapping

from autoshard.ops.call import Call, Rule
from autoshard.ops.pointwise import pointwise
from autoshard.ops.rule import OperatorRule
from autoshard.ops.space import Space, replicated


def _dropout(call: Call) -> OperatorRule:
    """Linear: ranks that hold terms of one sum draw one mask."""
    return pointwise(call, linear=[{0}])


def _drawn(call: Call) -> OperatorRule:
    """Numbers that do not depend on their place."""
    space = Space(call)
    return space.rule([], [space.free_dims(call.outputs[0].shape)])


def _rows(call: Call) -> OperatorRule:
    """A distribution per row."""
    *rows, values = call.inputs[0].shape
    space = Space(call)
    dims = space.free_dims(rows)
    drawn = space.fixed(call.outputs[0].shape[-1])
    return space.rule([(*dims, space.fixed(values))], [(*dims, drawn)])


SIZED_AT_RANDOM = """
    rand.default randn.default randint.default randint.low normal.float_float
""".split()  # noqa: SIM905  a table of words
"""Operators that make a tensor of independent numbers of one distribution."""

FILLING_AT_RANDOM = """
    bernoulli.default bernoulli.p binomial.default exponential.default normal_functional
    normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor poisson.default rand_like.default
    randint_like.default randint_like.low_dtype randn_like.default uniform.default
""".split()  # noqa: SIM905  a table of words
"""Operators that draw for every element on its own."""

DRAWING = """
    _cudnn_attention_backward _cudnn_attention_forward _cudnn_init_dropout_state _cudnn_rnn
    _efficient_attention_forward _flash_attention_forward
    _flash_attention_forward_no_dropout_inplace _fused_dropout _fused_sdp_choice _lstm_mps
    _nested_tensor_softmax_with_shape _sample_dirichlet _scaled_dot_product_attention_math
    _scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
    _standard_gamma _triton_scaled_dot_attention alpha_dropout bernoulli binomial cauchy
    exponential feature_alpha_dropout feature_dropout geometric gru.data log_normal lstm.data
    miopen_rnn normal poisson rand rand_like randint randint_like randn randn_like random
    randperm rnn_relu rnn_tanh rrelu rrelu_with_noise rrelu_with_noise_functional uniform
""".split()  # noqa: SIM905  a table of words
"""Operators or packets that draw random numbers and are not cut."""

RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": replicated for name in DRAWING},
    **{f"aten.{name}": pointwise for name in FILLING_AT_RANDOM},
    **{f"aten.{name}": _drawn for name in SIZED_AT_RANDOM},
    "aten.dropout.default": _dropout,
    "aten.native_dropout": _dropout,
    "aten.multinomial.default": _rows,
}
