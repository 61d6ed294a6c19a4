"""Rules of operators along sharded dims: equal statistics on every rank, exact results."""

from typing import Any

import pytest
import torch
from ops.calls import MakeExample, Prove, Values

from autoshard.ops import rule_for, strategies
from autoshard.runtime.program.sharded_kernels import attention

VALUES = Values(11)
real = VALUES.real


def shares(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=VALUES.generator)


LABELS = torch.tensor([1, -100, -100, 3, 2, 0, 1, 2])
PLACES = torch.tensor([[0, 3], [1, -100], [2, 2], [3, 0]] * 2)
TIES = torch.tensor(
    [[1, 2, 2, 0], [2, 1, 1, 2], [0, 0, 0, 0], [3, 4, 5, 6]] * 2, dtype=torch.float64
)
HOLES = real(8, 4).masked_fill(TIES > 2, -torch.inf)
NONE, MEAN, SUM = 0, 1, 2
BATCH = {"momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False, "training": True}
BATCH |= {"running_mean": None, "running_var": None}

SHOWN = torch.rand((2, 1, 8, 6), generator=VALUES.generator) > 0.4
SHOWN[0, :, :3] = False  # some queries see nothing
SHOWN[1, :, :, :3] = False  # and some nothing of a slice
LOW = torch.zeros(8, 6, dtype=torch.float64).masked_fill(SHOWN[1, 0], -torch.inf)

ATTENTION = "aten.scaled_dot_product_attention.default"
CAUSAL = {"is_causal": True}
GROUPS = {"is_causal": True, "enable_gqa": True}
LOSS, PICKED = "aten.cross_entropy_loss.default", "aten.nll_loss_nd.default"
CASES = [
    # classes of labels, of probabilities, with weights, smoothed
    *(
        (LOSS, {"self": real(8, 4), "target": LABELS, "reduction": to, **more}, expected)
        for to in (NONE, SUM)
        for more, expected in (
            ({}, "S(1) R -> I"),
            ({"label_smoothing": 0.1}, "S(1) R -> I"),
            ({"weight": shares(4)}, "S(1) R S(0) -> I"),
            ({"weight": shares(4), "label_smoothing": 0.1}, "S(1) R S(0) -> I"),
        )
    ),
    *(
        (LOSS, {"self": real(8, 4), "target": shares(8, 4), "reduction": to, **more}, expected)
        for to in (NONE, MEAN, SUM)
        for more, expected in (
            ({}, "S(1) S(1) -> I"),
            ({"weight": shares(4), "label_smoothing": 0.1}, "S(1) S(1) S(0) -> I"),
        )
    ),
    (LOSS, {"self": real(8, 4, 2), "target": PLACES, "reduction": NONE}, "S(1) R -> I"),
    (LOSS, {"self": real(8), "target": torch.tensor(3), "reduction": SUM}, "S(0) R -> I"),
    (
        LOSS,
        {"self": HOLES, "target": LABELS.clamp_min(-1), "reduction": SUM, "ignore_index": -1},
        "S(1) R -> I",
    ),
    # labels pick from logarithms; a mean counts all labels
    *(
        (PICKED, {"self": real(8, 4), "target": LABELS, "reduction": to, **more}, expected)
        for to in (NONE, MEAN, SUM)
        for more, expected in (({}, "S(1) R -> P"), ({"weight": shares(4)}, "S(1) R S(0) -> P"))
    ),
    (PICKED, {"self": real(8, 4), "target": LABELS, "reduction": MEAN}, "S(0) S(0) -> P"),
    (PICKED, {"self": real(8, 4, 2), "target": PLACES, "reduction": MEAN}, "S(2) S(1) -> P"),
    # along one dim or several
    *(
        (f"aten.{name}.int", {"self": values, "dim": dim}, f"S({dim % 2}) -> S({dim % 2})")
        for name in ("softmax", "log_softmax")
        for values, dim in ((real(8, 4), 0), (real(8, 4), -1), (HOLES, 1))
    ),
    ("aten.logsumexp.default", {"self": real(8, 4), "dim": [1]}, "S(1) -> I"),
    ("aten.logsumexp.default", {"self": real(8, 4), "dim": [0, 1], "keepdim": True}, "S(0) -> I"),
    ("aten.var.default", {"self": real(8, 4), "unbiased": False}, "S(1) -> I"),
    *(
        (f"aten.{name}.correction", {"self": real(8, 4), **more}, "S(0) -> I")
        for name in ("var", "std")
        for more in ({"dim": [0]}, {"dim": [0, 1], "keepdim": True, "correction": 0})
    ),
    ("aten.std.correction", {"self": torch.ones(8, 4).double(), "dim": [1]}, "S(1) -> I"),
    ("aten.linalg_vector_norm.default", {"self": real(8, 4), "dim": [1]}, "S(1) -> I"),
    ("aten.linalg_vector_norm.default", {"self": TIES}, "S(0) -> I"),
    *(
        (f"aten.{name}.default", {"self": TIES, "dim": [1]}, "S(1) -> I")
        for name in ("amax", "amin")
    ),
    ("aten.amax.default", {"self": TIES, "dim": [0, 1], "keepdim": True}, "S(0) -> I"),
    *((f"aten.{name}.dim", {"self": TIES, "dim": 1}, "S(1) -> I I") for name in ("max", "min")),
    ("aten.argmax.default", {"self": TIES, "dim": -1}, "S(1) -> I"),
    ("aten.argmin.default", {"self": TIES, "dim": 0, "keepdim": True}, "S(0) -> I"),
    # attention along keys
    *(
        (ATTENTION, {"query": query, "key": key, "value": value, **more}, expected)
        for query, key, value, more, expected in (
            (real(2, 4, 8, 4), real(2, 4, 6, 4), real(2, 4, 6, 2), {}, "R S(2) S(2) -> I"),
            (real(4, 2, 3), real(4, 8, 3), real(4, 8, 3), CAUSAL, "R S(1) S(1) -> I"),
            (real(4, 2, 8, 4), real(1, 2, 8, 4), real(1, 2, 8, 4), CAUSAL, "R S(2) S(2) -> I"),
            (real(2, 4, 1, 4), real(2, 4, 8, 4), real(2, 4, 8, 4), {}, "R S(2) S(2) -> I"),
            (real(2, 8, 8, 4), real(2, 4, 8, 4), real(2, 4, 8, 4), GROUPS, "R S(2) S(2) -> I"),
            *(
                (real(2, 4, 8, 4), real(2, 4, 6, 4), real(2, 4, 6, 4), more, expected)
                for more, expected in (
                    ({"attn_mask": SHOWN}, "R S(2) S(2) S(3) -> I"),
                    ({"attn_mask": LOW}, "R S(2) S(2) S(1) -> I"),
                    ({"attn_mask": real(2, 1, 8, 6)}, "R S(2) S(2) S(3) -> I"),
                    ({"attn_mask": real(4, 1, 6)}, "R S(2) S(2) S(2) -> I"),
                    ({"attn_mask": real(4, 8, 1)}, "R S(2) S(2) R -> I"),
                    ({"scale": 0.3}, "R S(2) S(2) -> I"),
                )
            ),
        )
    ),
    # normalisations
    (
        "aten.layer_norm.default",
        {"input": real(4, 8), "normalized_shape": [8], "weight": real(8), "bias": real(8)},
        "S(1) S(0) S(0) -> S(1)",
    ),
    (
        "aten.layer_norm.default",
        {"input": real(2, 4, 8), "normalized_shape": [4, 8], "weight": real(4, 8)},
        "S(2) S(1) -> S(2)",
    ),
    (
        "aten.layer_norm.default",
        {"input": real(4, 8) + 1e4, "normalized_shape": [8]},
        "S(1) -> S(1)",
    ),
    (
        "aten.rms_norm.default",
        {"input": real(4, 8), "normalized_shape": [8], "weight": real(8)},
        "S(1) S(0) -> S(1)",
    ),
    *(
        (
            "aten.group_norm.default",
            {"input": real(4, 8, 4, 2), "num_groups": n, "weight": real(8), "bias": real(8)},
            "S(2) R R -> S(2)",
        )
        for n in (1, 2, 4)
    ),
    (
        "aten.group_norm.default",
        {"input": real(4, 8, 4), "num_groups": 1, "weight": real(8), "bias": real(8)},
        "S(1) S(0) S(0) -> S(1)",
    ),
    (
        "aten.batch_norm.default",
        {"input": real(4, 8, 4, 2), "weight": real(8), "bias": real(8), **BATCH},
        "S(0) R R -> S(0)",
    ),
    (
        "aten.batch_norm.default",
        {"input": real(8, 4), "weight": None, "bias": None, **BATCH},
        "S(0) -> S(0)",
    ),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operator", "arguments", "expected"),
    CASES,
    ids=[f"{number}-{case[0].split('.')[1]}" for number, case in enumerate(CASES)],
)
def test_along_rule(
    operator: str, arguments: dict[str, Any], expected: str, example: MakeExample, prove: Prove
) -> None:
    assert expected in prove(example(operator, **arguments))


def test_channels_stay_whole_where_a_norm_tracks_statistics(
    example: MakeExample, prove: Prove
) -> None:
    tracked = BATCH | {"running_mean": real(8), "running_var": shares(8)}
    arguments = {"input": real(4, 8, 4), "weight": None, "bias": None}
    sharded = prove(example("aten.batch_norm.default", **arguments, **tracked))
    assert "S(0) R R -> S(0)" in sharded
    assert not any("S(1)" in text for text in sharded)
    assert "S(1) -> S(1)" in prove(example("aten.batch_norm.default", **arguments, **BATCH))


@pytest.mark.parametrize("more", [{}, GROUPS, {"attn_mask": real(2, 1, 8, 8)}], ids=str)
def test_attention_along_keys_makes_scores_in_blocks(
    more: dict[str, Any], example: MakeExample, prove: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 48)
    heads = {"query": real(2, 8, 8, 4), "key": real(2, 4, 8, 4), "value": real(2, 4, 8, 4)}
    if not more.get("enable_gqa"):
        heads["query"] = real(2, 4, 8, 4)
    prove(example(ATTENTION, **heads, **more))


def test_keys_stay_whole_where_attention_drops_some(example: MakeExample) -> None:
    heads = dict.fromkeys(("query", "key", "value"), real(2, 4, 8, 4))
    for probability in (0.0, 0.1):
        call = example(ATTENTION, **heads, dropout_p=probability).call
        shards = {str(strategy) for strategy in strategies(rule_for(call), (2,))}
        assert ("R S(2) S(2) -> I" in shards) == (probability == 0)
