"""Discovered rules of operators that have a spec: all correct, and almost all found."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.calls import make_example
from ops.simulation import prove_rule
from ops.test_image_rules import CASES as IMAGES
from ops.test_missing_rules import LEFT_OUT
from ops.test_product_rules import CASES as PRODUCTS
from ops.test_shape_rules import CASES as SHAPES

from autoshard.discovery.probe import NotTriableError, probe_of
from autoshard.discovery.search import RuleSearch
from autoshard.ops import (
    Call,
    Kernel,
    OperatorRule,
    axis_rules,
    is_view,
    rule_for,
    spec_for,
    strategies,
)
from autoshard.ops.examples import examples_of
from autoshard.ops.registry import FAMILIES
from autoshard.ops.rules.index_space import operator_rule

CASES = [
    (operator, arguments)
    for operator, arguments in [*PRODUCTS, *SHAPES, *IMAGES]
    if spec_for(operator).kernel is Kernel.PLAIN
    and spec_for(operator).draws is None
    and not is_view(operator)
]
"""Calls that a rank runs as they are: no other operator can be discovered."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found_rule(call: Call) -> OperatorRule:
    """What is found on a small form of a call.

    Raises:
        NotTriableError: it cannot be tried.
    """
    return operator_rule(call, RuleSearch(probe_of(call), time.monotonic() + 60).rule())


def options(rule: OperatorRule) -> set[str]:
    """Those of equal slices: what is found says nothing of others."""
    return {str(strategy) for strategy in strategies(replace(rule, uneven=frozenset()), (2,))}


BEYOND = {
    "aten.fft_ifftn.default": (
        r"(P -> P|S\(\d\) -> S\(\d\))",
        "With sizes to pad to, which are rare, the rule runs whole.",
    ),
}
"""Options that are found and true though the operator's rule leaves them out, and why."""

UNFOUND = {
    "aten.sum.default": (r"S\(\d\) -> P", "Sums of integers over ranks are not looked for."),
}
"""Options that a rule offers and discovery does not find, and why."""

REFUSED = {
    "aten.type_as.default": "share memory",
    "aten.meshgrid.indexing": "share memory",
    "aten.index.Tensor": "depend on the values",
    "aten.masked_scatter.default": "fails on small tensors",
    "aten.gather.default": "fails on small tensors",
    "aten.zeros_like.default": "always zero",
    "aten.eq.Scalar": "always zero",
    "aten.all.default": "always zero",
    "aten._is_all_true.default": "always zero",
    "aten.scalar_tensor.default": "no tensor inputs",
    "aten.arange.default": "no tensor inputs",
    "aten.arange.start": "no tensor inputs",
    "aten.linspace.default": "no tensor inputs",
    "aten.eye.default": "no tensor inputs",
}
"""Operators of which some call cannot be tried, and what is said."""

BY_OPERATOR: dict[str, list[dict[str, Any]]] = {}
for _operator, _arguments in CASES:
    BY_OPERATOR.setdefault(_operator, []).append(_arguments)


@pytest.mark.matrix
@pytest.mark.parametrize("operator", BY_OPERATOR)
def test_all_that_is_found_is_true_and_nothing_is_missing(operator: str) -> None:
    for arguments in BY_OPERATOR[operator]:
        example = make_example(operator, **arguments)
        try:
            rule = found_rule(example.call)
        except NotTriableError as error:
            assert REFUSED[operator] in str(error)  # noqa: PT017  most operators can be tried
            continue
        found = prove_rule(example, rule)
        offered = options(rule_for(example.call))
        assert stated(found - offered, {**LEFT_OUT, **BEYOND}, operator)
        assert stated(offered - found, UNFOUND, operator)


def stated(options: set[str], reasons: dict[str, tuple[str, str]], operator: str) -> bool:
    pattern, _ = reasons.get(operator, ("", ""))
    return all(re.fullmatch(pattern, option) for option in options)


CANNOT_BE_SMALL = {
    "aten._grouped_mm.default": "Its rows must come in multiples of 16 bytes.",
    "aten.embedding_bag.padding_idx": "One of its outputs counts nothing without padding.",
    "aten.lstm.input": "It draws random numbers.",
    "aten.repeat_interleave.self_int": "Hundreds of repeats make a tensor too large to try.",
    "aten.meshgrid.indexing": "It makes views.",
    "aten.real.default": "It makes views.",
    "aten.unfold.default": "It makes views.",
    "aten.type_as.default": "Floating-point inputs are tried in one type, so it returns its input.",
    "aten.upsample_nearest3d.vec": "Trying combinations of five dims takes more than a minute.",
}
"""Calls with no small form that can be tried, and why."""

LARGE = [
    call
    for family in FAMILIES
    for spec in family.SPECS
    for call in (example.call for example in examples_of(spec))
    if spec.kernel is Kernel.PLAIN
    and spec.draws is None
    and call.inputs
    and call.operator not in CANNOT_BE_SMALL
    and not is_view(call.operator)
]


@pytest.mark.matrix
@pytest.mark.parametrize("call", LARGE, ids=lambda call: call.operator)
def test_small_shapes_speak_for_large_ones(call: Call) -> None:
    """The rule of a call with dims of hundreds and thousands, found on a few dozen elements."""
    rule = found_rule(call)
    found, offered = ({str(o) for o in axis_rules(r, 2)} for r in (rule, rule_for(call)))
    beyond = {text.replace("->", " -> ").replace(",", " ") for text in found - offered}
    assert stated(beyond, {**LEFT_OUT, **BEYOND}, call.operator)
    assert offered <= found
