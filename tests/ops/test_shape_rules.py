"""Rules of operators that move, combine and reduce elements, on simulated ranks."""

from typing import Any

import pytest
import torch
from ops.calls import ELEMENTWISE, MakeExample, Prove, Values

from autoshard.ops import has_rule

VALUES = Values(2)
real, positive, ids = VALUES.real, VALUES.positive, VALUES.ids


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=VALUES.generator) > 0.4


X = real(4, 6, 8)

POINTWISE = [
    ("aten.add.Tensor", {"self": X, "other": real(4, 6, 8)}),
    ("aten.add.Tensor", {"self": X, "other": real(6, 1), "alpha": 2}),
    ("aten.add.Tensor", {"self": real(8), "other": X}),
    ("aten.add.Tensor", {"self": real(4, 1, 8), "other": real(6, 1)}),
    ("aten.add.Tensor", {"self": X, "other": 2.0}),
    ("aten.add.Tensor", {"self": X, "other": 0}),
    ("aten.add.Tensor", {"self": X, "other": ids(5, 8)}),
    ("aten.sub.Tensor", {"self": X, "other": real(1, 8)}),
    ("aten.sub.Tensor", {"self": ids(5, 4, 8), "other": 1}),
    ("aten.rsub.Scalar", {"self": X, "other": 1.0}),
    ("aten.mul.Tensor", {"self": X, "other": real(6, 8)}),
    ("aten.mul.Tensor", {"self": X, "other": 0.5}),
    ("aten.mul.Tensor", {"self": X, "other": torch.tensor(0.5, dtype=torch.float64)}),
    ("aten.mul.Tensor", {"self": ids(5, 4, 8), "other": real(8)}),
    ("aten.div.Tensor", {"self": X, "other": positive(8)}),
    ("aten.div.Tensor", {"self": X, "other": 3}),
    ("aten.div.Tensor", {"self": ids(9, 4, 8), "other": 8}),
    ("aten.div.Tensor_mode", {"self": X, "other": positive(8), "rounding_mode": "floor"}),
    ("aten.div.Tensor_mode", {"self": X, "other": positive(8), "rounding_mode": None}),
    ("aten.floor_divide.default", {"self": ids(9, 8), "other": 2}),
    ("aten.neg.default", {"self": X}),
    ("aten.clone.default", {"self": X}),
    ("aten.to.dtype", {"self": X, "dtype": torch.complex128}),
    ("aten.to.dtype", {"self": ids(9, 4, 8), "dtype": torch.float64}),
    ("aten.to.dtype", {"self": flags(4, 8), "dtype": torch.int64}),
    ("aten.type_as.default", {"self": X, "other": real(4, 6, 8)}),
    ("aten.type_as.default", {"self": X, "other": real(3)}),
    ("aten.where.self", {"condition": flags(6, 8), "self": X, "other": real(4, 1, 8)}),
    ("aten.where.ScalarOther", {"condition": flags(6, 8), "self": X, "other": -1.0}),
    ("aten.where.ScalarOther", {"condition": flags(6, 8), "self": X, "other": 0}),
    ("aten.where.ScalarSelf", {"condition": flags(8), "self": 0.0, "other": X}),
    ("aten.masked_fill.Scalar", {"self": X, "mask": flags(6, 8), "value": 0}),
    ("aten.masked_fill.Scalar", {"self": X, "mask": flags(6, 8), "value": float("-inf")}),
    (
        "aten.masked_fill.Tensor",
        {"self": X, "mask": flags(6, 8), "value": torch.tensor(2.0, dtype=torch.float64)},
    ),
    ("aten.pow.Tensor_Scalar", {"self": X, "exponent": 2}),
    ("aten.gelu.default", {"self": X, "approximate": "tanh"}),
    ("aten.silu.default", {"self": X}),
    ("aten.rsqrt.default", {"self": positive(4, 8)}),
    ("aten.clamp.default", {"self": X, "min": -0.5, "max": 0.5}),
    ("aten.lerp.Scalar", {"self": X, "end": real(8), "weight": 0.3}),
    ("aten.le.Tensor", {"self": ids(5, 4, 1), "other": ids(5, 8)}),
    ("aten.eq.Scalar", {"self": ids(3, 4, 8).double(), "other": 0}),
    ("aten.__and__.Tensor", {"self": flags(4, 8), "other": flags(8)}),
    ("aten.bitwise_not.default", {"self": flags(4, 8)}),
    ("aten.min.other", {"self": X, "other": real(8)}),
    ("aten.polar.default", {"abs": positive(4, 8), "angle": real(4, 8)}),
    ("aten.dropout.default", {"input": X, "p": 0.0, "train": True}),
    ("aten.dropout.default", {"input": X, "p": 0.5, "train": False}),
]

RESHAPES = [
    ((4, 6, 8), (24, 8)),
    ((24, 8), (4, 6, 8)),
    ((4, 6, 8), (4, 6, 2, 4)),
    ((4, 6, 8), (192,)),
    ((4, 6, 8), (8, 24)),
    ((6, 4), (4, 6)),
    ((4, 6), (2, 3, 4)),
    ((4, 9, 4), (6, 6, 4)),
    ((1, 8, 1), (8,)),
    ((8,), (1, 8, 1)),
    ((1, 1), ()),
    ((), (1,)),
    ((4, 0, 2), (0, 8)),
    ((2, 4, 8), (4, 16)),
    ((12, 5), (4, 15)),
    ((3, 4), (4, 3)),
]

VIEWS = [
    *(
        ("aten.reshape.default", {"self": real(*before), "shape": list(after)})
        for before, after in RESHAPES
    ),
    ("aten.view.default", {"self": X, "size": [24, -1]}),
    ("aten.flatten.using_ints", {"self": X, "start_dim": 1}),
    ("aten.flatten.using_ints", {"self": X}),
    ("aten.unflatten.int", {"self": X, "dim": -1, "sizes": [2, 4]}),
    ("aten.unsqueeze.default", {"self": X, "dim": -1}),
    ("aten.squeeze.dim", {"self": real(4, 1, 8), "dim": 1}),
    ("aten.squeeze.dim", {"self": real(4, 2, 8), "dim": 1}),
    ("aten.squeeze.default", {"self": real(4, 1, 2)}),
    ("aten.transpose.int", {"self": X, "dim0": 1, "dim1": -1}),
    ("aten.permute.default", {"self": X, "dims": [2, 0, -2]}),
    ("aten.t.default", {"self": real(4, 6)}),
    ("aten.t.default", {"self": real(4)}),
    ("aten.numpy_T.default", {"self": X}),
    ("aten.expand.default", {"self": real(4, 1, 8), "size": [4, 6, 8]}),
    ("aten.expand.default", {"self": real(1, 8), "size": [4, -1, 8]}),
    ("aten.expand.default", {"self": real(), "size": [4, 8]}),
    ("aten.broadcast_to.default", {"self": real(8), "size": [4, 8]}),
    ("aten.slice.Tensor", {"self": X, "dim": 1, "start": 0, "end": 2}),
    ("aten.slice.Tensor", {"self": X, "dim": 2, "start": 1, "end": 9223372036854775807}),
    ("aten.slice.Tensor", {"self": X, "dim": 0, "start": 0, "end": 9223372036854775807}),
    ("aten.slice.Tensor", {"self": X, "dim": -1, "start": -8, "end": 8}),
    ("aten.slice.Tensor", {"self": X, "dim": -1, "start": 0, "end": 8, "step": 2}),
    ("aten.slice.Tensor", {"self": X, "dim": 2, "start": 1, "end": 9, "step": 2}),
    ("aten.slice.Tensor", {"self": X, "dim": 2, "start": 2, "end": 8, "step": 2}),
    ("aten.slice.Tensor", {"self": X, "dim": 2, "start": 0, "end": 7, "step": 4}),
    ("aten.narrow.default", {"self": X, "dim": 1, "start": 0, "length": 6}),
    ("aten.select.int", {"self": X, "dim": 1, "index": -1}),
    ("aten.unbind.int", {"self": X, "dim": -3}),
    ("aten.unbind.int", {"self": X}),
    ("aten.split.Tensor", {"self": X, "split_size": 4, "dim": 2}),
    ("aten.split.Tensor", {"self": X, "split_size": 3}),
    ("aten.split_with_sizes.default", {"self": X, "split_sizes": [2, 6], "dim": -1}),
    ("aten.chunk.default", {"self": X, "chunks": 2, "dim": -1}),
    ("aten.cat.default", {"tensors": [X, real(4, 6, 2)], "dim": -1}),
    ("aten.cat.default", {"tensors": [X, X]}),
    ("aten.cat.default", {"tensors": [real(0), X], "dim": 2}),
    ("aten.cat.default", {"tensors": [real(4, 6, 0), X], "dim": 2}),
    ("aten.cat.default", {"tensors": [real(0), X, real(2, 6, 8), real(0, 6, 8)]}),
    ("aten.stack.default", {"tensors": [X, real(4, 6, 8)], "dim": -1}),
    ("aten.stack.default", {"tensors": [X, X, X]}),
    ("aten.pad.default", {"self": X, "pad": [0, 1], "mode": "constant", "value": -100.0}),
    ("aten.pad.default", {"self": X, "pad": [0, 0, 2, 1]}),
    ("aten.pad.default", {"self": X, "pad": [1, 2], "mode": "reflect"}),
    ("aten.constant_pad_nd.default", {"self": X, "pad": [1, 0], "value": 0}),
    ("aten.diff.default", {"self": X, "n": 1, "dim": -1, "prepend": real(4, 6, 1)}),
    ("aten.diff.default", {"self": ids(9, 4, 8)}),
    ("aten.roll.default", {"self": X, "shifts": [1], "dims": [1]}),
    ("aten.roll.default", {"self": X, "shifts": [3]}),
    ("aten.flip.default", {"self": X, "dims": [0, -1]}),
    ("aten.tril.default", {"self": X, "diagonal": 1}),
    ("aten.triu.default", {"self": X}),
    ("aten.tril.default", {"self": real(8, 12)}),
    ("aten.triu.default", {"self": real(12, 8), "diagonal": -3}),
    ("aten.repeat.default", {"self": X, "repeats": [1, 2, 1]}),
    ("aten.repeat.default", {"self": real(4, 8), "repeats": [3, 1, 2]}),
    ("aten.repeat_interleave.self_int", {"self": X, "repeats": 3, "dim": 1}),
    ("aten.repeat.default", {"self": real(1, 6), "repeats": [4, 4, 1]}),
    ("aten.repeat.default", {"self": real(6), "repeats": [0, 2]}),
    ("aten.repeat_interleave.self_int", {"self": X, "repeats": 3}),
    ("aten.repeat_interleave.self_int", {"self": X, "repeats": 3, "dim": 1, "output_size": 18}),
    ("aten.view_as_complex.default", {"self": real(4, 8, 2)}),
    ("aten.view_as_real.default", {"self": torch.view_as_complex(real(4, 8, 2))}),
    ("aten.real.default", {"self": torch.view_as_complex(real(4, 8, 2))}),
    ("aten.unfold.default", {"self": X, "dimension": -2, "size": 4, "step": 2}),
    ("aten.unfold.default", {"self": X, "dimension": 0, "size": 2, "step": 1}),
    ("aten.fft_fftn.default", {"self": torch.complex(X, X.flip(0)), "dim": [1, 2]}),
    ("aten.fft_fftn.default", {"self": torch.complex(X, X.flip(0))}),
    ("aten.fft_ifftn.default", {"self": torch.complex(X, X.flip(0)), "s": [4], "dim": [1]}),
]

REDUCTIONS = [
    ("aten.sum.default", {"self": X}),
    ("aten.sum.default", {"self": flags(4, 8)}),
    ("aten.sum.default", {"self": real()}),
    ("aten.sum.dim_IntList", {"self": X, "dim": [1]}),
    ("aten.sum.dim_IntList", {"self": X, "dim": [-1, 0], "keepdim": True}),
    ("aten.sum.dim_IntList", {"self": X, "dim": None}),
    ("aten.sum.dim_IntList", {"self": X, "dim": []}),
    ("aten.mean.default", {"self": X}),
    ("aten.mean.dim", {"self": X, "dim": [-1], "keepdim": True}),
    ("aten.mean.dim", {"self": X, "dim": [0, 2]}),
    ("aten.prod.dim_int", {"self": X, "dim": 1}),
    ("aten.amax.default", {"self": X, "dim": [-1]}),
    ("aten.amax.default", {"self": X}),
    ("aten.max.default", {"self": X}),
    ("aten.max.dim", {"self": X, "dim": -1}),
    ("aten.min.dim", {"self": X, "dim": 1, "keepdim": True}),
    ("aten.argmax.default", {"self": X, "dim": -1}),
    ("aten.argmax.default", {"self": X}),
    ("aten.any.dim", {"self": torch.eye(4, 8) > 0, "dim": 1}),
    ("aten.all.default", {"self": torch.arange(32).reshape(4, 8) != 3}),
    ("aten._is_all_true.default", {"self": torch.arange(32).reshape(4, 8) != 3}),
    ("aten.var.correction", {"self": X, "dim": [-1], "correction": 0, "keepdim": True}),
    ("aten.std.dim", {"self": X, "dim": [1]}),
    ("aten.logsumexp.default", {"self": X, "dim": [-1]}),
    ("aten.linalg_vector_norm.default", {"self": X, "ord": 2, "dim": [-1], "keepdim": True}),
    ("aten.softmax.int", {"self": X, "dim": -1}),
    ("aten.softmax.int", {"self": real(), "dim": 0}),
    ("aten.log_softmax.int", {"self": X, "dim": 1}),
    ("aten.cumsum.default", {"self": X, "dim": -1}),
    ("aten.cumsum.default", {"self": flags(4, 8), "dim": 0}),
    ("aten.cumprod.default", {"self": X, "dim": 1}),
    ("aten.sort.default", {"self": X}),
    ("aten.sort.stable", {"self": X, "stable": True, "dim": 0, "descending": True}),
    ("aten.argsort.default", {"self": X, "dim": 1}),
    ("aten.topk.default", {"self": X, "k": 2}),
    ("aten.histc.default", {"self": X, "bins": 4, "min": -1, "max": 1}),
    ("aten.histc.default", {"self": X, "bins": 4}),
]

WRITTEN = {"self": real(4, 6, 8), "dim": 1, "index": torch.stack([torch.randperm(6)] * 8, -1)}
INDEXING = [
    ("aten.index.Tensor", {"self": X, "indices": [ids(4, 8)]}),
    ("aten.index.Tensor", {"self": X, "indices": [None, ids(6, 8, 2)]}),
    ("aten.index.Tensor", {"self": X, "indices": [ids(4, 8, 1), ids(6, 4)]}),
    ("aten.index.Tensor", {"self": X, "indices": [ids(4, 8), None, ids(8, 8)]}),
    ("aten.index.Tensor", {"self": X, "indices": [None, ids(6, 4, 1), ids(8, 2)]}),
    ("aten.index.Tensor", {"self": X, "indices": [torch.tensor(1), ids(6, 4)]}),
    ("aten.index.Tensor", {"self": X, "indices": [flags(4)]}),
    (
        "aten.index_put.default",
        {"self": X, "indices": [torch.tensor([2, 0])], "values": real(2, 6, 8)},
    ),
    (
        "aten.index_put.default",
        {"self": X, "indices": [None, torch.tensor([2, 0, 2])], "values": real(3, 8)}
        | {"accumulate": True},
    ),
    (
        "aten.index_put.default",
        {"self": X, "indices": [ids(4, 4, 1), ids(6, 2)], "values": real(4, 2, 8)}
        | {"accumulate": True},
    ),
    (
        "aten.index_put.default",
        {"self": X, "indices": [ids(4, 6)], "values": real(8), "accumulate": True},
    ),
    ("aten.gather.default", {"self": X, "dim": 1, "index": ids(6, 4, 2, 8)}),
    ("aten.gather.default", {"self": X, "dim": -1, "index": ids(8, 2, 6, 4)}),
    ("aten.gather.default", {"self": real(4, 4), "dim": 0, "index": ids(4, 4, 4)}),
    ("aten.gather.default", {"self": real(4, 1), "dim": 1, "index": ids(1, 4, 8)}),
    (
        "aten.scatter.src",
        {"self": real(6, 8), "dim": 0, "index": WRITTEN["index"][:4], "src": real(4, 8)},
    ),
    ("aten.scatter.value", {"self": real(4, 8), "dim": 1, "index": ids(8, 4, 2), "value": 1}),
    ("aten.scatter.value", {"self": real(4, 8), "dim": 1, "index": ids(8, 4, 2), "value": 0}),
    ("aten.scatter.value", {"self": real(4, 8), "dim": 1, "index": ids(8, 2, 2), "value": 0}),
    (
        "aten.scatter_add.default",
        {"self": real(4, 8), "dim": 1, "index": ids(8, 4, 6), "src": real(4, 6)},
    ),
    ("aten.index_select.default", {"self": X, "dim": 1, "index": ids(6, 4)}),
    (
        "aten.index_add.default",
        {"self": X, "dim": -2, "index": ids(6, 4), "source": real(4, 4, 8), "alpha": 2},
    ),
    (
        "aten.masked_scatter.default",
        {"self": real(4, 8), "mask": torch.arange(32).reshape(4, 8) % 3 == 0, "source": real(14)},
    ),
]

CREATIONS = [
    ("aten.zeros.default", {"size": [4, 8], "dtype": torch.float64}),
    ("aten.ones.default", {"size": []}),
    ("aten.full.default", {"size": [4, 8], "fill_value": 3.0}),
    ("aten.scalar_tensor.default", {"s": 2.0}),
    ("aten.new_ones.default", {"self": real(3), "size": [4, 8], "dtype": torch.bool}),
    ("aten.new_zeros.default", {"self": X, "size": [4, 6, 8]}),
    ("aten.new_full.default", {"self": X, "size": [4, 8], "fill_value": 2}),
    ("aten.zeros_like.default", {"self": X}),
    ("aten.full_like.default", {"self": X, "fill_value": 2}),
    ("aten.arange.default", {"end": 8}),
    ("aten.arange.start", {"start": 2, "end": 10}),
    ("aten.linspace.default", {"start": -1.0, "end": 1.0, "steps": 8}),
    ("aten.eye.default", {"n": 4}),
    ("aten.meshgrid.indexing", {"tensors": [real(4), real(6), real(2)], "indexing": "ij"}),
    ("aten.meshgrid.indexing", {"tensors": [real(4), real(6), real()], "indexing": "xy"}),
]

NO_RULE = [
    ("aten.cdist.default", {"x1": real(4, 2), "x2": real(6, 2)}),
]

CASES = [*POINTWISE, *VIEWS, *REDUCTIONS, *INDEXING, *CREATIONS, *NO_RULE]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operator", "arguments"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_rule_is_true(operator: str, arguments: Any, example: MakeExample, prove: Prove) -> None:
    prove(example(operator, **arguments))


def test_operators_without_a_rule_run_whole(example: MakeExample, prove: Prove) -> None:
    for operator, arguments in NO_RULE:
        assert not has_rule(operator)
        found = prove(example(operator, **arguments))
        assert all("S" not in strategy and "P" not in strategy for strategy in found)


def test_every_pointwise_operator_is_one() -> None:
    for packet in ELEMENTWISE:
        overloads = getattr(torch.ops.aten, packet)
        tagged = {
            name: torch.Tag.pointwise in getattr(overloads, name).tags
            for name in overloads.overloads()
        }
        untagged = {"__and__", "__or__", "floor_divide", "hardswish", "log_sigmoid", "polar"}
        assert any(tagged.values()) or packet in untagged, packet


def test_merged_heads_are_sharded_by_the_major_factor(example: MakeExample, prove: Prove) -> None:
    found = prove(example("aten.reshape.default", self=real(2, 4, 8), shape=[8, 8]))
    assert found == {"I -> I", "R -> R", "S(0) -> S(0)", "S(2) -> S(1)", "P -> P"}


def test_triangles_are_sharded_along_rows_and_columns(example: MakeExample, prove: Prove) -> None:
    sharded = prove(example("aten.tril.default", self=X, diagonal=-1))
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"} <= sharded


def test_split_heads_keep_the_shard(example: MakeExample, prove: Prove) -> None:
    found = prove(example("aten.reshape.default", self=real(4, 6, 8), shape=[4, 6, 2, 4]))
    assert "S(2) -> S(2)" in found


def test_added_constant_is_not_linear(example: MakeExample, prove: Prove) -> None:
    assert "P -> P" not in prove(example("aten.add.Tensor", self=X, other=2.0))
    assert "P -> P" in prove(example("aten.mul.Tensor", self=X, other=2.0))


def test_integers_are_never_partial_inputs(example: MakeExample, prove: Prove) -> None:
    found = prove(example("aten.add.Tensor", self=ids(4, 8), other=ids(4, 8)))
    assert found == {"I I -> I", "R R -> R", "S(0) S(0) -> S(0)"}
