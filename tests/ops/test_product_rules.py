"""Rules of operators that compute, on simulated ranks, forward and backward."""

from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers an operator
from ops.calls import MakeExample, Prove, Values

VALUES = Values(1)
real, positive, ids = VALUES.real, VALUES.positive, VALUES.ids


def mask(*shape: int) -> torch.Tensor:
    """A mask that leaves every row something to look at."""
    allowed = torch.rand(shape, generator=VALUES.generator) > 0.4
    allowed[..., 0] = True
    return allowed


def padded(target: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(target.numel()).reshape(target.shape) % 5 == 1, -100, target)


LINEAR = "aten.linear.default"
MATMUL = "aten.matmul.default"
MATRIX_PRODUCTS = [
    (LINEAR, {"input": real(4, 6, 8), "weight": real(12, 8), "bias": real(12)}),
    (LINEAR, {"input": real(4, 8), "weight": real(4, 8)}),
    (LINEAR, {"input": real(8), "weight": real(12, 8), "bias": real(12)}),
    (LINEAR, {"input": real(4, 8), "weight": real(8)}),
    (LINEAR, {"input": real(4, 1, 8), "weight": real(1, 8), "bias": real(1)}),
    (LINEAR, {"input": real(4, 1), "weight": real(8, 1), "bias": real(8)}),
    (MATMUL, {"self": real(4, 6, 8), "other": real(8, 4)}),
    (MATMUL, {"self": real(4, 6, 8), "other": real(4, 8, 4)}),
    (MATMUL, {"self": real(4, 1, 6, 8), "other": real(2, 8, 4)}),
    (MATMUL, {"self": real(6, 8), "other": real(4, 8, 4)}),
    (MATMUL, {"self": real(8), "other": real(4, 8, 6)}),
    (MATMUL, {"self": real(4, 6, 8), "other": real(8)}),
    (MATMUL, {"self": real(8), "other": real(8)}),
    (MATMUL, {"self": real(4, 8), "other": real(8)}),
    ("aten.mm.default", {"self": real(4, 8), "mat2": real(8, 6)}),
    ("aten.mv.default", {"self": real(4, 8), "vec": real(8)}),
    ("aten.dot.default", {"self": real(8), "tensor": real(8)}),
    ("aten.bmm.default", {"self": real(4, 6, 8), "mat2": real(4, 8, 2)}),
    ("aten.addmm.default", {"self": real(12), "mat1": real(4, 8), "mat2": real(8, 12)}),
    (
        "aten.addmm.default",
        {"self": real(4, 1), "mat1": real(4, 8), "mat2": real(8, 12), "beta": 2, "alpha": 0.5},
    ),
    ("aten.addmm.default", {"self": real(4, 12), "mat1": real(4, 8), "mat2": real(8, 12)}),
    (
        "aten.baddbmm.default",
        {"self": real(4, 6), "batch1": real(4, 4, 8), "batch2": real(4, 8, 6)},
    ),
    (
        "aten.baddbmm.default",
        {"self": real(4, 1, 6), "batch1": real(4, 4, 8), "batch2": real(4, 8, 6), "beta": 3},
    ),
    (
        "aten.einsum.default",
        {"equation": "bshd,bthd->bhst", "tensors": [real(4, 3, 2, 4), real(4, 6, 2, 4)]},
    ),
    (
        "aten.einsum.default",
        {"equation": "bi,ijk,bk->bj", "tensors": [real(4, 2), real(2, 6, 4), real(4, 4)]},
    ),
    ("aten.einsum.default", {"equation": "...i,ij->...j", "tensors": [real(4, 2), real(2, 4)]}),
    ("aten.einsum.default", {"equation": "ii,ij->ij", "tensors": [real(4, 4), real(4, 2)]}),
    ("aten.einsum.default", {"equation": "ab,bc", "tensors": [real(4, 2), real(2, 4)]}),
    ("aten.einsum.default", {"equation": "b...i, i -> b...", "tensors": [real(4, 3, 2), real(2)]}),
    ("aten.einsum.default", {"equation": "...i,i...", "tensors": [real(4, 2), real(2, 4)]}),
    ("aten.einsum.default", {"equation": "...i,...i->i", "tensors": [real(4, 2), real(4, 2)]}),
    (
        "aten.einsum.default",
        {"equation": "...nd,...md->...nm", "tensors": [real(2, 1, 4, 6), real(8, 2, 6)]},
    ),
    (
        "transformers.grouped_mm_fallback.default",
        {"input": real(8, 4), "weight": real(4, 4, 6), "offs": torch.tensor([2, 2, 5, 8])},
    ),
    *(
        (
            "aten._grouped_mm.default",
            {"self": real(rows, 16).float(), "mat2": real(len(ends), 16, 32).float()}
            | {"offs": torch.tensor(ends, dtype=torch.int32)},
        )
        for rows, ends in (
            (8, [2, 2, 5, 8]),
            (8, [8, 8, 8, 8]),
            (8, [0, 0, 0, 8]),
            (12, [1, 5, 7, 12]),
            (6, [6]),
            (8, [3, 8]),
        )
    ),
]

SDPA = "aten.scaled_dot_product_attention.default"
HEADS = {"query": real(2, 4, 8, 4), "key": real(2, 4, 6, 4), "value": real(2, 4, 6, 2)}
SQUARE = {"query": real(2, 4, 8, 4), "key": real(2, 4, 8, 4), "value": real(2, 4, 8, 4)}
GROUPS = {"query": real(2, 8, 4, 4), "key": real(2, 4, 4, 4), "value": real(2, 4, 4, 4)}
CAUSAL = {"is_causal": True}
ATTENTION = [
    (SDPA, HEADS),
    (SDPA, HEADS | {"scale": 0.3}),
    (SDPA, HEADS | {"attn_mask": mask(2, 1, 8, 6)}),
    (SDPA, HEADS | {"attn_mask": mask(1, 1, 8, 6)}),
    (SDPA, HEADS | {"attn_mask": mask(8, 6)}),
    (SDPA, HEADS | {"attn_mask": mask(2, 4, 1, 6)}),
    (SDPA, HEADS | {"attn_mask": real(2, 4, 8, 6)}),
    (SDPA, HEADS | {"attn_mask": real(1, 4, 8, 6)}),
    (SDPA, SQUARE | {"is_causal": True}),
    (SDPA, SQUARE | {"is_causal": True, "dropout_p": 0.0, "scale": 0.7}),
    (SDPA, HEADS | {"query": real(2, 4, 4, 4), "is_causal": True}),
    (SDPA, {"query": real(4, 8, 4), "key": real(4, 8, 4), "value": real(4, 8, 2)} | CAUSAL),
    (SDPA, GROUPS | {"enable_gqa": True, "is_causal": True}),
    (SDPA, GROUPS | {"enable_gqa": True, "attn_mask": mask(2, 1, 4, 4)}),
    (SDPA, GROUPS | {"enable_gqa": True, "attn_mask": mask(2, 8, 4, 4)}),
    (SDPA, {"query": real(4, 8, 4), "key": real(4, 6, 4), "value": real(4, 6, 4)}),
    (SDPA, {"query": real(8, 1, 4), "key": real(8, 6, 4), "value": real(8, 6, 4)}),
]

LAYER_NORM = "aten.layer_norm.default"
CHANNELS = {"input": real(4, 8, 3), "weight": real(8), "bias": real(8)}
STATISTICS = {"running_mean": real(8), "running_var": positive(8)}
NO_STATISTICS = {"running_mean": None, "running_var": None}
FLAGS = {"momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
NORMALISATIONS = [
    (
        LAYER_NORM,
        {"input": real(4, 6, 8), "normalized_shape": [8], "weight": real(8), "bias": real(8)},
    ),
    (LAYER_NORM, {"input": real(4, 6, 8), "normalized_shape": [6, 8]}),
    (LAYER_NORM, {"input": real(4, 8), "normalized_shape": [8], "weight": real(8)}),
    (LAYER_NORM, {"input": real(8), "normalized_shape": [8], "bias": real(8)}),
    (
        "aten.rms_norm.default",
        {"input": real(4, 6, 8), "normalized_shape": [8], "weight": real(8), "eps": 1e-6},
    ),
    ("aten.group_norm.default", CHANNELS | {"num_groups": 4}),
    ("aten.group_norm.default", CHANNELS | {"num_groups": 1}),
    ("aten.group_norm.default", {"input": real(2, 8), "num_groups": 2, "weight": real(8)}),
    ("aten._weight_norm.default", {"v": real(4, 6, 3), "g": positive(4, 1, 1), "dim": 0}),
    ("aten._weight_norm.default", {"v": real(4, 6, 3), "g": positive(1, 1, 3), "dim": 2}),
    ("aten.batch_norm.default", CHANNELS | STATISTICS | FLAGS | {"training": False}),
    ("aten.batch_norm.default", CHANNELS | NO_STATISTICS | FLAGS | {"training": True}),
]

EMBEDDING = "aten.embedding.default"
EMBEDDINGS = [
    (EMBEDDING, {"weight": real(12, 4), "indices": ids(12, 4, 6)}),
    (EMBEDDING, {"weight": real(12, 4), "indices": ids(12, 8), "padding_idx": 5}),
    (EMBEDDING, {"weight": real(12, 4), "indices": torch.full((4,), 7), "padding_idx": 7}),
    (EMBEDDING, {"weight": real(12, 4), "indices": torch.tensor(11)}),
    (
        EMBEDDING,
        {
            "weight": real(8, 1),
            "indices": torch.tensor([[0], [5], [0], [5]]),
            "scale_grad_by_freq": True,
        },
    ),
    *(
        (
            "aten.embedding_bag.padding_idx",
            {"weight": real(12, 4), "indices": ids(12, 8), "offsets": torch.tensor([0, 2, 2, 5])}
            | {"scale_grad_by_freq": False, "mode": mode, "sparse": False}
            | {"per_sample_weights": weights, "include_last_offset": False, "padding_idx": padding},
        )
        for mode, weights, padding in ((0, None, -1), (0, real(8), 3), (1, None, 5), (2, None, -1))
    ),
]

CROSS_ENTROPY = "aten.cross_entropy_loss.default"
LOSSES = [
    *(
        (CROSS_ENTROPY, {"self": real(12, 5), "target": padded(ids(5, 12)), "reduction": reduction})
        for reduction in (0, 1, 2)
    ),
    (
        CROSS_ENTROPY,
        {
            "self": real(4, 5, 6),
            "target": padded(ids(5, 4, 6)),
            "weight": positive(5),
            "reduction": 2,
            "label_smoothing": 0.1,
        },
    ),
    (CROSS_ENTROPY, {"self": real(4, 6), "target": real(4, 6).softmax(1), "reduction": 2}),
    (CROSS_ENTROPY, {"self": real(4, 6), "target": real(4, 6).softmax(1), "reduction": 0}),
    (
        CROSS_ENTROPY,
        {"self": real(4, 6, 2), "target": real(4, 6, 2).softmax(1), "label_smoothing": 0.1},
    ),
    (CROSS_ENTROPY, {"self": real(6), "target": torch.tensor(3), "reduction": 2}),
    (CROSS_ENTROPY, {"self": real(6, 5), "target": ids(5, 6), "reduction": 2, "ignore_index": 0}),
    ("aten.nll_loss_nd.default", {"self": real(4, 5, 2), "target": ids(5, 4, 2), "reduction": 2}),
    ("aten.nll_loss_nd.default", {"self": real(4, 5), "target": ids(5, 4), "reduction": 0}),
    ("aten.nll_loss_nd.default", {"self": real(4, 5), "target": ids(5, 4)}),
    *(
        (f"aten.{name}.default", {"self": real(4, 6), "target": real(4, 6), "reduction": reduction})
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for reduction in (0, 1, 2)
    ),
    *(
        ("aten.kl_div.default", {"self": real(4, 6), "target": positive(4, 6), "reduction": way})
        for way in (0, 1, 2)
    ),
    ("aten.mse_loss.default", {"self": real(4, 6), "target": real(4, 6)}),
    (
        "aten.binary_cross_entropy_with_logits.default",
        {"self": real(4, 6), "target": positive(4, 6), "weight": positive(6)},
    ),
    (
        "aten.binary_cross_entropy_with_logits.default",
        {"self": real(4, 6), "target": positive(4, 6), "pos_weight": positive(6), "reduction": 2},
    ),
]

LSTM = "aten.lstm.input"
RECURRENT = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True}
GATES = [real(24, 4), real(24, 6), real(24), real(24)]
RECURRENCES = [
    (
        LSTM,
        {"input": real(3, 4, 4), "hx": [real(1, 4, 6), real(1, 4, 6)], "params": GATES}
        | {**RECURRENT, "bidirectional": False, "batch_first": False},
    ),
    (
        LSTM,
        {"input": real(4, 3, 4), "hx": [real(2, 4, 6), real(2, 4, 6)], "params": GATES * 2}
        | {**RECURRENT, "bidirectional": True, "batch_first": True},
    ),
    (
        "aten.gru.input",
        {"input": real(3, 4, 4), "hx": real(1, 4, 8), "params": [real(24, 4), real(24, 8)]}
        | {**RECURRENT, "has_biases": False, "bidirectional": False, "batch_first": False},
    ),
]

CASES = [
    *MATRIX_PRODUCTS,
    *ATTENTION,
    *NORMALISATIONS,
    *EMBEDDINGS,
    *LOSSES,
    *RECURRENCES,
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operator", "arguments"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_rule_is_true(operator: str, arguments: Any, example: MakeExample, prove: Prove) -> None:
    prove(example(operator, **arguments))


def test_linear_has_the_known_strategies(example: MakeExample, prove: Prove) -> None:
    found = prove(example(LINEAR, input=real(4, 6, 8), weight=real(12, 8)))
    assert found == {
        "I I -> I",
        "R R -> R",
        "S(0) R -> S(0)",
        "S(1) R -> S(1)",
        "R S(0) -> S(2)",
        "S(2) S(1) -> P",
        "P R -> P",
        "R P -> P",
    }


def test_bias_enters_a_contraction_once(example: MakeExample, prove: Prove) -> None:
    found = prove(example(LINEAR, input=real(4, 8), weight=real(12, 8), bias=real(12)))
    assert "S(1) S(1) P -> P" in found
    assert "P R P -> P" in found
    assert "S(1) S(1) R -> P" not in found


def test_queries_are_sharded_with_a_mask_or_without(example: MakeExample, prove: Prove) -> None:
    assert "S(2) R R -> S(2)" in prove(example(SDPA, **SQUARE, is_causal=True))
    assert "S(2) R R -> S(2)" not in prove(example(SDPA, **HEADS, is_causal=True))
    masked = prove(example(SDPA, **HEADS, attn_mask=mask(2, 1, 8, 6)))
    assert "S(2) R R S(2) -> S(2)" in masked


def test_grouped_queries_are_sharded_by_group(example: MakeExample, prove: Prove) -> None:
    found = prove(example(SDPA, **GROUPS, enable_gqa=True, is_causal=True))
    assert "S(1) S(1) S(1) -> S(1)" in found
    assert "S(1) R R -> S(1)" not in found


def test_vocabulary_is_sharded(example: MakeExample, prove: Prove) -> None:
    found = prove(example(EMBEDDING, weight=real(12, 4), indices=ids(12, 4)))
    assert {"S(0) R -> P", "S(1) R -> S(1)", "R S(0) -> S(0)"} <= found


def test_mean_over_probabilities_is_sharded_by_position(example: MakeExample, prove: Prove) -> None:
    call = {"self": real(4, 6), "target": real(4, 6).softmax(1)}
    assert "S(0) S(0) -> P" in prove(example(CROSS_ENTROPY, **call))


def test_groups_of_channels_are_sharded(example: MakeExample, prove: Prove) -> None:
    found = prove(example("aten.group_norm.default", **CHANNELS, num_groups=4))
    assert found == {"I I I -> I", "R R R -> R", "S(0) R R -> S(0)", "S(1) S(0) S(0) -> S(1)"}


def test_experts_and_their_rows_are_sharded(example: MakeExample, prove: Prove) -> None:
    operator, arguments = next(case for case in MATRIX_PRODUCTS if "grouped" in case[0])
    found = prove(example(operator, **arguments))
    assert {"R S(0) R -> P", "S(0) R R -> S(0)", "R S(2) R -> S(1)", "S(1) S(1) R -> P"} <= found


def test_sequences_are_sharded_by_sample(example: MakeExample, prove: Prove) -> None:
    operator, arguments = RECURRENCES[1]
    sharded = " ".join(["S(0) S(1) S(1)", *"R" * 8])
    assert f"{sharded} -> S(0) S(1) S(1)" in prove(example(operator, **arguments))


def test_summed_loss_is_sharded_by_position(example: MakeExample, prove: Prove) -> None:
    call = {"self": real(12, 5), "target": ids(5, 12), "reduction": 2}
    assert prove(example(CROSS_ENTROPY, **call)) == {"I I -> I", "R R -> R", "S(0) S(0) -> P"}
