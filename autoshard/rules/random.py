"""Random operators: they are right on slices only if each slice draws its own numbers.

The runtime seeds by the slice (`Kernel.SEEDED`), so that copies and terms of a sum
agree, and slices differ.
"""

from collections.abc import Mapping

from autoshard.rules.call import Call, Rule
from autoshard.rules.pointwise import pointwise
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import replicated


def _dropout(call: Call) -> OperatorRule:
    """Linear: ranks that hold terms of one sum draw one mask."""
    return pointwise(call, linear=[{0}])


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
    exponential feature_alpha_dropout feature_dropout geometric gru log_normal lstm miopen_rnn
    multinomial native_dropout normal normal_functional poisson rand rand_like randint
    randint_like randn randn_like random randperm rnn_relu rnn_tanh rrelu rrelu_with_noise
    rrelu_with_noise_functional uniform
""".split()  # noqa: SIM905  a table of words
"""Packets that draw random numbers and are not cut."""

RULES: Mapping[str, Rule] = {
    "aten.dropout.default": _dropout,
    **{f"aten.{packet}": replicated for packet in DRAWING},
}
