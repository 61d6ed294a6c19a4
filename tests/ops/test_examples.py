"""Examples of all operators on simulated ranks; the page of operators; operators of models."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ops.calls import example_cases

from autoshard.graph import Argument, Node, Ref, Tensor, Token
from autoshard.graph.normalise.functional import OVERWRITES, functional_form, is_inplace
from autoshard.ops import has_rule, spec_for
from autoshard.ops.examples import Example, examples_of
from autoshard.ops.registry import FAMILIES
from autoshard.ops.rules.index_space import replicated
from autoshard.ops.rules.spec import saves_everything
from autoshard.ops.table import NOT_PLANNED, page, table

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
SPECS = [spec for family in FAMILIES for spec in family.SPECS]
EXAMPLES = [example for spec in SPECS for example in examples_of(spec)]

SEEN = """
    __and__.Tensor _assert_scalar.default _assert_tensor_metadata.default
    _grouped_mm.default _is_all_true.default _operator.eq _operator.ge _operator.getitem
    _operator.le _operator.mul _weight_norm.default abs.default adaptive_avg_pool1d.default
    adaptive_avg_pool2d.default add.Tensor add_.Tensor addmm.default alias.default
    arange.default arange.start arange.start_step argmax.default argsort.default
    argsort.stable avg_pool2d.default baddbmm.default batch_norm.default
    binary_cross_entropy_with_logits.default bitwise_not.default bmm.default
    broadcast_tensors.default cat.default ceil.default chunk.default clamp.default
    clone.default contiguous.default conv1d.default conv2d.default conv2d.padding
    conv_transpose2d.input copy_.default cos.default cross_entropy_loss.default
    cumsum.default detach_.default diff.default div.Tensor div.Tensor_mode div_.Tensor
    dropout.default dropout_.default einsum.default embedding.default
    embedding_bag.padding_idx empty_like.default eq.Scalar eq.Tensor exp.default
    expand.default eye.default fft_fftn.default flat_apply flatten.using_ints flex_attention
    floor.default
    floor_divide.default full.default full_like.default gather.default ge.Scalar
    gelu.default grid_sampler.default group_norm.default gru.input gt.Scalar gt.Tensor
    hardtanh.default histc.default index.Tensor index_add_.default index_put_.default
    item.default layer_norm.default le.Scalar le.Tensor lift_fresh_copy.default
    linear.default linspace.default log.default log1p.default log_softmax.int lstm.input
    lt.Scalar lt.Tensor masked_fill.Scalar masked_fill_.Scalar masked_scatter.default
    matmul.default max.dim max_pool2d.default mean.dim meshgrid.indexing min.other
    mse_loss.default mul.Tensor ne.Scalar neg.default new_empty.default new_ones.default
    new_zeros.default numpy_T.default ones.default ones_like.default pad.default
    permute.default polar.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    prod.dim_int rand.default real.default relu.default relu_.default repeat.default
    repeat_interleave.self_int reshape.default roll.default rsqrt.default rsub.Scalar
    scalar_tensor.default scaled_dot_product_attention.default scatter_.src scatter_.value
    scatter_add.default select.int sigmoid.default sign.default silu.default sin.default
    slice.Tensor softmax.int softplus.default sort.default split.Tensor
    split_with_sizes.default sqrt.default squeeze.dim stack.default sub.Tensor sum.default
    sum.dim_IntList sym_size.int t.default tanh.default to.device to.dtype to.dtype_layout
    topk.default torch._functorch.predispatch._add_batch_dim
    torch._functorch.predispatch._remove_batch_dim
    torch._functorch.predispatch._vmap_decrement_nesting
    torch._functorch.predispatch._vmap_increment_nesting
    torch._functorch.predispatch.lazy_load_decompositions torch.sym_ite transpose.int unfold.default
    tril.default triu.default type_as.default unbind.int unflatten.int unsqueeze.default
    upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest2d.vec view.default
    view_as_complex.default view_as_real.default where.ScalarOther where.self
    wrap_with_autocast wrap_with_set_grad_enabled zeros.default zeros_like.default
""".split()  # noqa: SIM905  a table of words
"""Operators in exports of 132 real models of 55 families, with torch 2.13."""


def test_the_committed_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "run `python -m autoshard.ops.table`"
    assert PAGE.with_suffix(".csv").read_text() == table(), "run `python -m autoshard.ops.table`"


@pytest.mark.parametrize("name", SEEN)
def test_what_models_use_has_a_rule_or_comes_to_none(name: str) -> None:
    gone = {operator for names in NOT_PLANNED for operator in names.split()}
    if name in gone:
        return
    operator = f"aten.{name}"
    if is_inplace(operator):
        assert operator not in OVERWRITES
        operator = functional_form(Node("node", operator, (), ("out",)))
    assert has_rule(operator)
    assert spec_for(operator).saves is not saves_everything


def _meta(tensor: Tensor) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype.value)
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _concrete(argument: Argument, values: Iterator[torch.Tensor]) -> Any:
    if isinstance(argument, Ref):
        return next(values)
    if isinstance(argument, tuple):
        return [_concrete(item, values) for item in argument]
    return getattr(torch, argument.value) if isinstance(argument, Token) else argument


@pytest.mark.matrix
@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[f"{i}-{e.call.operator}" for i, e in enumerate(EXAMPLES)]
)
def test_examples_are_real_calls(example: Example) -> None:
    """On the meta device the operator takes these shapes and makes those."""
    call = example.call
    values = iter([_meta(tensor) for tensor in call.inputs])
    arguments = {key: _concrete(value, values) for key, value in call.arguments}
    namespace, packet, overload = call.operator.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not call.inputs:
        arguments["device"] = "meta"
    made = operator(**arguments)
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)
    for output, tensor in zip(outputs, call.outputs, strict=True):
        assert tuple(output.shape) == tensor.shape
        assert str(output.dtype) == f"torch.{tensor.dtype.value}"


PROVED = list(example_cases())


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operator", "arguments"), PROVED, ids=[f"{i}-{case[0]}" for i, case in enumerate(PROVED)]
)
def test_examples_compute_the_same_on_ranks(
    operator: str, arguments: dict[str, Any], example: Callable[..., Any], prove: Callable[..., Any]
) -> None:
    """Rule and local kernel: values and gradients of every strategy are those of the operator."""
    prove(example(operator, **arguments), meshes=((2,),))


def test_every_rule_has_an_example() -> None:
    shown = {_function(spec.rule) for spec in SPECS if spec.examples}
    assert {_function(spec.rule) for spec in SPECS} - shown == {replicated}


def _function(rule: Any) -> Any:
    return rule.func if isinstance(rule, partial) else rule
