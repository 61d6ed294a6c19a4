"""Index letters that an axis does not divide: rules for uneven shards, on simulated ranks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers an operator
from ops.calls import MakeExample, Prove, Values

from autoshard.ops import OperatorRule, rule_for, strategies

VALUES = Values(1)
real, ids = VALUES.real, VALUES.ids
MESHES = ((4,), (2,), (3,), (2, 2), (4, 2))


LOSS = "aten.cross_entropy_loss.default"
ATTENTION = "aten.scaled_dot_product_attention.default"
GROUP_NORM = "aten.group_norm.default"
HEADS = {name: real(2, 7, 10, 3) for name in ("query", "key", "value")}
ATTENDED = {"S(1) S(1) S(1) -> S(1)", "S(2) R R -> S(2)", "R S(2) S(2) -> I"}
IMAGE = real(3, 10, 7, 1)

UNEVEN: list[tuple[str, Mapping[str, Any], set[str]]] = [
    ("aten.mul.Tensor", {"self": real(10, 6), "other": real(10, 1)}, {"S(0) S(0) -> S(0)"}),
    ("aten.mul.Tensor", {"self": real(9, 3), "other": real(6)[:3]}, set()),
    (
        "aten.linear.default",
        {"input": real(10, 6, 7), "weight": real(25, 7), "bias": real(25)},
        {"S(0) R R -> S(0)", "S(2) S(1) P -> P", "R S(0) S(0) -> S(2)"},
    ),
    (
        "aten.bmm.default",
        {"self": real(7, 2, 10), "mat2": real(7, 10, 3)},
        {"S(0) S(0) -> S(0)", "S(2) S(1) -> P"},
    ),
    (
        "transformers.grouped_mm_fallback.default",
        {
            "input": real(10, 4),
            "weight": real(7, 4, 6),
            "offs": torch.tensor([1, 1, 3, 4, 7, 9, 10], dtype=torch.int32),
        },
        {"S(0) R R -> S(0)", "R S(0) R -> P"},
    ),
    (
        "aten.embedding.default",
        {"weight": real(11, 6), "indices": ids(11, 10, 3), "padding_idx": 10},
        {"S(0) R -> P", "R S(0) -> S(0)"},
    ),
    (ATTENTION, HEADS, ATTENDED),
    (ATTENTION, {**HEADS, "is_causal": True}, ATTENDED),
    (
        "aten.layer_norm.default",
        {
            "input": real(7, 10),
            "normalized_shape": [10],
            "weight": real(10),
            "bias": real(10),
        },
        {"S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"},
    ),
    (
        "aten.rms_norm.default",
        {"input": real(6, 10), "normalized_shape": [10], "weight": real(10)},
        {"S(1) S(0) -> S(1)"},
    ),
    (
        GROUP_NORM,
        {"input": real(6, 10, 7), "num_groups": 10, "weight": real(10), "bias": real(10)},
        {"S(1) S(0) S(0) -> S(1)", "S(2) R R -> S(2)"},
    ),
    (
        GROUP_NORM,
        {"input": real(6, 10, 7), "num_groups": 1, "weight": real(10), "bias": real(10)},
        {"S(1) S(0) S(0) -> S(1)", "S(2) R R -> S(2)"},
    ),
    (GROUP_NORM, {"input": real(7, 10), "num_groups": 5}, {"S(0) -> S(0)"}),
    (
        "aten.batch_norm.default",
        {
            "input": real(10, 6, 7),
            "weight": real(6),
            "bias": real(6),
            "running_mean": None,
            "running_var": None,
            "training": True,
            "momentum": 0.1,
            "eps": 1e-5,
            "cudnn_enabled": False,
        },
        {"S(0) R R -> S(0)", "S(2) R R -> S(2)"},
    ),
    ("aten.softmax.int", {"self": real(6, 10), "dim": 1}, {"S(1) -> S(1)"}),
    ("aten.log_softmax.int", {"self": real(7, 10), "dim": 1}, {"S(0) -> S(0)", "S(1) -> S(1)"}),
    ("aten.logsumexp.default", {"self": real(6, 10), "dim": [1]}, {"S(1) -> I"}),
    ("aten.argmax.default", {"self": real(6, 10), "dim": 1}, {"S(1) -> I"}),
    ("aten.max.dim", {"self": real(6, 10), "dim": 1}, {"S(1) -> I I"}),
    ("aten.amax.default", {"self": real(6, 10), "dim": [1]}, {"S(1) -> I"}),
    ("aten.var.correction", {"self": real(6, 10), "dim": [1], "correction": 1}, {"S(1) -> I"}),
    ("aten.linalg_vector_norm.default", {"self": real(6, 10), "dim": [1]}, {"S(1) -> I"}),
    ("aten.sum.dim_IntList", {"self": real(10, 7), "dim": [1]}, {"S(0) -> S(0)", "S(1) -> P"}),
    ("aten.mean.dim", {"self": real(10, 7), "dim": [1]}, {"S(0) -> S(0)", "S(1) -> P"}),
    ("aten.mean.default", {"self": real(10, 7)}, {"S(0) -> P", "S(1) -> P"}),
    (
        "aten.mse_loss.default",
        {"self": real(10, 7), "target": real(10, 7)},
        {"S(0) S(0) -> P", "S(1) S(1) -> P"},
    ),
    (
        "aten.adaptive_avg_pool2d.default",
        {"self": real(6, 6, 10, 7), "output_size": [1, 1]},
        {"S(2) -> P", "S(3) -> P"},
    ),
    (
        LOSS,
        {"self": real(7, 10), "target": ids(10, 7), "reduction": 2, "label_smoothing": 0.1},
        {"S(0) S(0) -> P", "S(1) R -> I"},
    ),
    (
        LOSS,
        {"self": real(7, 10), "target": real(7, 10).softmax(1), "weight": real(10).exp()},
        {"S(0) S(0) R -> P", "S(1) S(1) S(0) -> I"},
    ),
    (
        "aten.nll_loss_nd.default",
        {"self": real(7, 10), "target": ids(10, 7), "weight": real(10).exp()},
        {"S(0) S(0) R -> P", "S(1) R S(0) -> P"},
    ),
    (
        "aten.conv2d.default",
        {"input": IMAGE, "weight": real(10, 1, 1, 1), "bias": real(10), "groups": 10},
        {"S(1) S(0) S(0) -> S(1)", "S(2) R R -> S(2)"},
    ),
    (
        "aten.conv2d.default",
        {"input": IMAGE, "weight": real(7, 10, 1, 1)},
        {"S(1) S(1) -> P", "R S(0) -> S(1)", "S(2) R -> S(2)"},
    ),
    # Rows that are merged are sharded elsewhere than rows alone.
    ("aten.reshape.default", {"self": real(10, 3, 7), "shape": [10, 21]}, {"S(0) -> S(0)"}),
    ("aten.reshape.default", {"self": real(10, 3), "shape": [30]}, set()),
    ("aten.reshape.default", {"self": real(10, 100), "shape": [10, 25, 4]}, {"S(0) -> S(0)"}),
    ("aten.unsqueeze.default", {"self": real(10), "dim": 0}, {"S(0) -> S(1)"}),
    ("aten.expand.default", {"self": real(1, 7), "size": [10, 7]}, {"R -> S(0)", "S(1) -> S(1)"}),
    ("aten.repeat.default", {"self": real(7), "repeats": [10, 1]}, {"R -> S(0)", "S(0) -> S(1)"}),
    ("aten.repeat.default", {"self": real(7), "repeats": [3]}, set()),
    (
        "aten.transpose.int",
        {"self": real(10, 7), "dim0": 0, "dim1": 1},
        {"S(0) -> S(1)", "S(1) -> S(0)"},
    ),
    ("aten.slice.Tensor", {"self": real(10, 7), "dim": 1, "start": 2}, {"S(0) -> S(0)"}),
    ("aten.slice.Tensor", {"self": real(10, 6), "dim": 0, "start": 0}, {"S(0) -> S(0)"}),
    ("aten.slice.Tensor", {"self": real(20, 6), "dim": 0, "step": 2}, set()),
    ("aten.cat.default", {"tensors": [real(10, 6), real(10, 2)], "dim": 1}, {"S(0) S(0) -> S(0)"}),
    ("aten.cat.default", {"tensors": [real(10), real(10)], "dim": 0}, set()),
    ("aten.new_zeros.default", {"self": real(3), "size": [10]}, {"R -> S(0)"}),
    (
        "aten.gather.default",
        {"self": real(6, 5), "dim": 1, "index": ids(5, 6, 10)},
        {"R S(1) -> S(1)"},
    ),
    (
        "aten.index_put.default",
        {"self": real(6, 7), "indices": [ids(6, 10)], "values": real(10, 7), "accumulate": True},
        {"S(1) R S(1) -> S(1)", "P S(0) S(0) -> P"},
    ),
    ("aten.cumsum.default", {"self": real(10, 7), "dim": 0}, {"S(1) -> S(1)"}),
]


def on_four(rule: OperatorRule) -> set[str]:
    return {str(strategy) for strategy in strategies(rule, (4,))}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operator", "arguments", "uneven"),
    UNEVEN,
    ids=[f"{i}-{operator}" for i, (operator, _, _) in enumerate(UNEVEN)],
)
def test_rule_is_true_of_unequal_shares(
    example: MakeExample,
    prove: Prove,
    operator: str,
    arguments: Mapping[str, Any],
    uneven: set[str],
) -> None:
    call = example(operator, **arguments)
    rule = rule_for(call.call)
    assert on_four(rule) - on_four(replace(rule, uneven=frozenset())) == uneven
    prove(call, meshes=MESHES)


def test_a_merged_letter_sharded_unevenly_is_refuted(example: MakeExample, prove: Prove) -> None:
    call = example("aten.reshape.default", self=real(10, 3), shape=[30])
    wrong = replace(rule_for(call.call), uneven=frozenset(rule_for(call.call).sizes))
    with pytest.raises(AssertionError, match="is wrong"):
        prove(call, wrong, meshes=[(4,)])


def test_unequal_shares_are_not_sharded_again(example: MakeExample) -> None:
    rule = rule_for(example("aten.neg.default", self=real(10)).call)
    found = {str(strategy) for strategy in strategies(rule, (4, 2))}
    assert {"S(0),R -> S(0),R", "R,S(0) -> R,S(0)"} <= found
    assert not any(text.count("S(0)") > 2 for text in found)
    # Nor are equal shares sharded unevenly: 10 into 5 and 5, and these into 2, 2 and 1.
    assert not any(text.count("S(0)") > 2 for text in map(str, strategies(rule, (2, 3))))


def test_the_largest_share_is_what_is_priced(example: MakeExample) -> None:
    rule = rule_for(example("aten.neg.default", self=real(50257, 6)).call)
    (found,) = (s for s in strategies(rule, (8,)) if str(s) == "S(0) -> S(0)")
    assert sorted(found.sizes.values()) == [6, 6283]
