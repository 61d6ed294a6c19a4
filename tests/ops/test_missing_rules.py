"""Every sharding that holds on execution is in the rule, or excluded for a stated reason."""

import re
from collections import defaultdict
from dataclasses import replace

import pytest
from ops.calls import MakeExample
from ops.discovery import missing_options
from ops.test_image_rules import CASES as IMAGES
from ops.test_product_rules import CASES as PRODUCTS
from ops.test_shape_rules import CASES as SHAPES

from autoshard.ops import rule_for

LENDS = "The values do not matter, and others read the tensor, replicated or sharded, anyway."
SCALES = "Scales and weights of classes are parameters, which never arrive as sums."
LEFT_OUT = {
    "aten.scaled_dot_product_attention.default": (
        r"R R S\(\d\)( R)? -> S\(\d\)",
        "Cutting the depth of the values would repeat all scores on every rank.",
    ),
    "aten.layer_norm.default": ("R P( P)? -> P", SCALES),
    "aten.rms_norm.default": ("R P -> P", SCALES),
    "aten.group_norm.default": ("R P( P)? -> P", SCALES),
    "aten.batch_norm.default": ("R P P -> P", SCALES),
    "aten.cross_entropy_loss.default": ("R R P -> P", SCALES),
    "aten.binary_cross_entropy_with_logits.default": ("R R P -> P", SCALES),
    "aten.nll_loss_nd.default": (
        "P R -> P",
        "Logarithms of probabilities come from a logarithm, and that makes no sums.",
    ),
    "aten.embedding_bag.padding_idx": (
        "(P R R|P R R R|R R R P) -> P R R R",
        "Linearity makes all outputs partial, and the tables of integers cannot be.",
    ),
    "aten.type_as.default": (".* -> .*", "Normalised graphs have `aten.to.dtype` in its place."),
    "aten.cat.default": (
        "(?=.*P).* -> .*",
        "What is empty has every type; it is offered as whole or sharded.",
    ),
    "aten.repeat_interleave.self_int": (
        r"(P -> P|S\(0\) -> S\(0\)|S\(2\) -> S\(2\))",
        "`output_size` is the size of the whole; hardly any program gives it.",
    ),
    "aten.softmax.int": ("P -> [IR]", "The softmax of one number is 1."),
    "aten.index.Tensor": (
        r"(P R -> P|S\(0\) S\(0\) -> S\(0\)|S\(\d\) R -> S\(\d\))",
        "How many elements a mask picks is data, so programs of fixed shapes have none.",
    ),
    "aten.new_ones.default": (".* -> .*", LENDS),
    "aten.new_zeros.default": (".* -> .*", LENDS),
    "aten.new_full.default": (".* -> .*", LENDS),
    "aten.zeros_like.default": ("P -> [PR]", LENDS),
    "aten.full_like.default": ("P -> R", LENDS),
    "aten.meshgrid.indexing": (
        "(?=.*P).* -> .*",
        "Coordinates are never sums, and rarely have gradients.",
    ),
    "aten.cdist.default": (".* -> .*", "It has no rule."),
}
"""Options that hold but are not offered: a pattern of them, and why."""

CASES = defaultdict(list)
for operator, arguments in [*PRODUCTS, *SHAPES, *IMAGES]:
    CASES[operator].append(arguments)


@pytest.mark.matrix
@pytest.mark.parametrize("operator", CASES)
def test_what_holds_is_offered(operator: str, example: MakeExample) -> None:
    examples = [example(operator, **arguments) for arguments in CASES[operator]]
    missing = {
        str(option)
        for made in examples
        if all(tensor.numel for tensor in made.call.outputs)
        for option in missing_options(made)
    }
    pattern, _ = LEFT_OUT.get(operator, ("", ""))
    assert {option for option in missing if not re.fullmatch(pattern, option)} == set()
    assert bool(missing) == (operator in LEFT_OUT)


def test_an_option_that_is_left_out_is_found(example: MakeExample) -> None:
    made = example("aten.linear.default", **PRODUCTS[0][1])
    narrow = replace(rule_for(made.call), linear=(), whole=frozenset({"*1"}))
    missing = {str(option) for option in missing_options(made, narrow)}
    assert missing == {"S(0) R R -> S(0)", "P R P -> P", "R P P -> P"}
