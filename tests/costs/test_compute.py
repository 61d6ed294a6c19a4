from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.costs import Category, Execution, categorise, efficiency_key, operator_times
from autoshard.graph import Argument, DType, Tensor
from autoshard.mesh import Device, OperatorFit, RooflineFit
from autoshard.mesh.topology import MATMUL_EFFICIENCY, TILE
from autoshard.ops import Call, Dims, OperatorRule, Strategy, strategies
from autoshard.ops.rules.collectives import Reductions

DEVICE = Device(
    "toy",
    {"float32": 1e9, "bfloat16": 1e10},
    memory_bandwidth=1e6,
    memory=10**9,
    launch_overhead=0.5,
)
FAST_MEMORY = replace(DEVICE, memory_bandwidth=1e30)
FAST_COMPUTE = replace(DEVICE, peak_flops={"float32": 1e30, "bfloat16": 1e30})


def dims(pattern: str) -> Dims:
    return tuple((letter,) for letter in pattern)


def rule(
    inputs: str, output: str, *, flops: float = 2.0, contracted: str = "", **sizes: int
) -> OperatorRule:
    return OperatorRule(
        sizes=sizes,
        inputs=tuple(dims(pattern) for pattern in inputs.split(",")),
        outputs=(dims(output),),
        contracted=frozenset(contracted),
        flops_per_point=flops,
    )


def tensor(
    rule: OperatorRule, pattern: str, dtype: DType = DType.FLOAT32, *, grad: bool = False
) -> Tensor:
    return Tensor(tuple(rule.sizes[letter] for letter in pattern), dtype, grad)


def whole(rule: OperatorRule) -> list[Strategy]:
    return [Strategy((), (), rule.sizes)]


def efficiency(*extents: int) -> float:
    return MATMUL_EFFICIENCY * float(np.prod([m / (m + TILE) for m in extents]))


LINEAR = rule("bsk,nk", "bsn", contracted="k", b=2, s=64, k=96, n=160)
FLOPS = 2.0 * 2 * 64 * 96 * 160
NBYTES = 4.0 * (2 * 64 * 96 + 160 * 96 + 2 * 64 * 160)


def linear_time(device: Device, *, grads: tuple[bool, bool], training: bool = True) -> float:
    inputs = [tensor(LINEAR, "bsk", grad=grads[0]), tensor(LINEAR, "nk", grad=grads[1])]
    outputs = [tensor(LINEAR, "bsn")]
    times = operator_times(LINEAR, whole(LINEAR), inputs, outputs, device, training=training)
    assert times.shape == (1,)
    return float(times[0])


@pytest.mark.parametrize(
    ("grads", "training", "kernels"),
    [
        ((True, True), True, 3),
        ((False, True), True, 2),
        ((True, False), True, 2),
        ((False, False), True, 1),
        ((True, True), False, 1),
    ],
)
def test_a_matmul_runs_once_more_for_each_gradient(
    grads: tuple[bool, bool], training: bool, kernels: int
) -> None:
    by_compute = FLOPS / (1e9 * efficiency(2 * 64, 160, 96)) + 0.5
    by_memory = NBYTES / 1e6 + 0.5
    for device, one in ((FAST_MEMORY, by_compute), (FAST_COMPUTE, by_memory)):
        found = linear_time(device, grads=grads, training=training)
        assert found == pytest.approx(kernels * one)


def test_a_matmul_takes_the_peak_of_its_dtype() -> None:
    inputs = [tensor(LINEAR, "bsk", DType.BFLOAT16), tensor(LINEAR, "nk", DType.BFLOAT16)]
    outputs = [tensor(LINEAR, "bsn", DType.BFLOAT16)]
    found = operator_times(LINEAR, whole(LINEAR), inputs, outputs, FAST_MEMORY, training=False)
    assert found[0] == pytest.approx(FLOPS / (1e10 * efficiency(128, 160, 96)) + 0.5)


def test_a_bias_gradient_is_a_stream() -> None:
    with_bias = rule("bsk,nk,n", "bsn", contracted="k", **LINEAR.sizes)
    inputs = [tensor(with_bias, "bsk"), tensor(with_bias, "nk"), tensor(with_bias, "n", grad=True)]
    outputs = [tensor(with_bias, "bsn")]
    found = operator_times(
        with_bias, whole(with_bias), inputs, outputs, FAST_COMPUTE, training=True
    )
    forward = (NBYTES + 4 * 160) / 1e6 + 0.5
    backward = 4 * (2 * 64 * 160 + 160) / 1e6 + 0.5
    assert found[0] == pytest.approx(forward + backward)


def test_sharded_letters_shrink_flops_bytes_and_efficiency() -> None:
    found = operator_times(
        LINEAR,
        [Strategy((), (), {**LINEAR.sizes, "n": 40}), Strategy((), (), {**LINEAR.sizes, "k": 24})],
        [tensor(LINEAR, "bsk"), tensor(LINEAR, "nk")],
        [tensor(LINEAR, "bsn")],
        FAST_MEMORY,
        training=False,
    )
    assert found == pytest.approx(
        [
            FLOPS / 4 / (1e9 * efficiency(128, 40, 96)) + 0.5,
            FLOPS / 4 / (1e9 * efficiency(128, 160, 24)) + 0.5,
        ]
    )


ADD = rule("ij,ij", "ij", flops=1.0, i=1000, j=10)


@pytest.mark.parametrize(
    ("grads", "passes"), [((False, False), 3), ((True, False), 3 + 4), ((True, True), 3 + 5)]
)
def test_a_stream_moves_its_tensors(grads: tuple[bool, bool], passes: int) -> None:
    # Backward reads both inputs and the output's gradient, and writes each gradient needed.
    inputs = [tensor(ADD, "ij", grad=grad) for grad in grads]
    outputs = [tensor(ADD, "ij")]
    found = operator_times(ADD, whole(ADD), inputs, outputs, FAST_COMPUTE, training=True)
    kernels = 2 if any(grads) else 1
    assert found[0] == pytest.approx(passes * 0.04 + kernels * 0.5)


def test_a_stream_computes_at_the_rate_of_float32() -> None:
    inputs = [tensor(ADD, "ij", DType.BFLOAT16, grad=True), tensor(ADD, "ij", DType.BFLOAT16)]
    outputs = [tensor(ADD, "ij", DType.BFLOAT16)]
    found = operator_times(ADD, whole(ADD), inputs, outputs, FAST_MEMORY, training=True)
    assert found[0] == pytest.approx(1e4 / 1e9 + 2e4 / 1e9 + 1.0)


def test_views_are_free() -> None:
    inputs, outputs = [tensor(ADD, "ij", grad=True)] * 2, [tensor(ADD, "ij")]
    found = operator_times(
        ADD, whole(ADD) * 3, inputs, outputs, DEVICE, training=True, is_view=True
    )
    assert found.tolist() == [0.0, 0.0, 0.0]


def test_a_lookup_reads_only_the_rows_it_needs() -> None:
    embedding = rule("vh,bs", "bsh", flops=0.0, contracted="v", v=50000, h=8, b=2, s=5)
    inputs = [tensor(embedding, "vh", grad=True), tensor(embedding, "bs", DType.INT64)]
    outputs = [tensor(embedding, "bsh")]
    forward = (4 * 80 + 8 * 10 + 4 * 80) / 1e6
    found = [
        operator_times(embedding, whole(embedding), inputs, outputs, DEVICE, training=training)[0]
        for training in (False, True)
    ]
    assert found[0] == pytest.approx(forward + 0.5)
    # The gradient of the table is written whole.
    assert found[1] == pytest.approx(2 * forward + 4 * 400000 / 1e6 + 1.0)


def test_a_loss_reads_all_its_scores() -> None:
    loss = rule("nc,n", "n", flops=0.0, n=10, c=1000)
    inputs = [tensor(loss, "nc"), tensor(loss, "n", DType.INT64)]
    found = operator_times(loss, whole(loss), inputs, [tensor(loss, "n")], DEVICE, training=False)
    assert found[0] == pytest.approx((40000 + 80 + 40) / 1e6 + 0.5)


@pytest.mark.parametrize(
    ("operator", "category"),
    [
        (LINEAR, Category.CONTRACTION),
        (rule("bmk,bkn", "bmn", b=2, m=3, k=4, n=5), Category.CONTRACTION),
        (rule("mk,k", "m", m=3, k=4), Category.CONTRACTION),
        (rule("bhld,bhsd,bhse", "bhle", b=2, h=2, l=4, s=4, d=8, e=8), Category.CONTRACTION),
        (rule("k,k", "", k=4), Category.STREAM),
        (rule("bk,bk", "b", b=3, k=4), Category.STREAM),
        (rule("bk,k", "bk", b=3, k=4), Category.STREAM),
        (rule("bk", "b", b=3, k=4), Category.STREAM),
        (rule("nc,c", "n", flops=0.0, n=3, c=4), Category.STREAM),
    ],
    ids=str,
)
def test_operators_have_a_category(operator: OperatorRule, category: Category) -> None:
    inputs = [
        Tensor(tuple(operator.sizes[letter] for (letter,) in letters), DType.FLOAT32)
        for letters in operator.inputs
    ]
    assert categorise(operator, inputs, is_view=False) is category
    assert categorise(operator, inputs, is_view=True) is Category.VIEW


def test_attention_is_priced_by_its_own_formula() -> None:
    attention = rule("bhld,bhsd,bhse", "bhle", flops=0.375, b=2, h=4, l=64, s=32, d=16, e=8)
    inputs = [tensor(attention, p, grad=True) for p in ("bhld", "bhsd", "bhse")]
    found = operator_times(
        attention, whole(attention), inputs, [tensor(attention, "bhle")], FAST_MEMORY, training=True
    )
    flops = 2 * 2 * 4 * 64 * 32 * (16 + 8)
    # 32 keys have 16 + 8 numbers for the 8 that are made of a query.
    once = flops / (1e9 * efficiency(32 * 24 // 8, 64, 8)) + 0.5
    assert found[0] == pytest.approx(4 * once)


@pytest.mark.parametrize(
    ("queries", "keys"), [(8, 8), (8, 16), (2, 16), (1, 8), (8, 4), (8, 2), (4, 4), (2, 4)]
)
def test_causal_attention_takes_as_long_as_the_rank_with_most_scores(
    queries: int, keys: int
) -> None:
    """Ranks have 8 or less of 8 queries, and 16 or less of 16 keys."""
    causal = replace(
        rule("bld,bsd,bse", "ble", flops=4.0, b=2, l=8, s=16, d=4, e=4), causal=("l", "s")
    )
    scores = max(
        sum(first_key + key <= first + query for query in range(queries) for key in range(keys))
        for first in range(0, 8, queries)
        for first_key in range(0, 16, keys)
    )
    inputs = [tensor(causal, pattern) for pattern in ("bld", "bsd", "bse")]
    found = operator_times(
        causal,
        [Strategy((), (), {**causal.sizes, "l": queries, "s": keys})],
        inputs,
        [tensor(causal, "ble")],
        FAST_MEMORY,
        training=False,
    )
    flops = 4 * 2 * scores * 4 * 4
    whole_rows = efficiency(2 * keys * 4, queries, 4)
    assert found[0] == pytest.approx(flops / (1e9 * whole_rows) + 0.5)


@pytest.mark.parametrize("queries", [8, 4, 2])
def test_balanced_attention_takes_equal_shares_of_the_mask(queries: int) -> None:
    causal = replace(
        rule("bld,bsd,bse", "ble", flops=4.0, b=2, l=8, s=8, d=4, e=4), causal=("l", "s")
    )
    inputs = [tensor(causal, pattern) for pattern in ("bld", "bsd", "bse")]
    found = operator_times(
        causal,
        [Strategy((), (), {**causal.sizes, "l": queries})],
        inputs,
        [tensor(causal, "ble")],
        FAST_MEMORY,
        training=False,
        execution=Execution(balanced=True),
    )
    scores = sum(key <= query for query in range(8) for key in range(8)) * queries / 8
    whole_rows = efficiency(2 * 8 * 4, queries, 4)
    assert found[0] == pytest.approx(4 * 2 * scores * 4 * 4 / (1e9 * whole_rows) + 0.5)


def test_scores_go_through_memory_where_keys_are_sharded() -> None:
    attention = rule("ld,sd,se", "le", flops=4.0, l=8, s=16, d=4, e=4)
    spilled = Reductions.of("max sum", over="s", per="l", itemsize=4, spilled="ls", spilled_bytes=6)
    inputs = [tensor(attention, pattern) for pattern in ("ld", "sd", "se")]
    halves = [Strategy((), (), {**attention.sizes, letter: 8}) for letter in ("l", "s")]
    fused, sharded = (
        operator_times(
            chosen, halves, inputs, [tensor(attention, "le")], FAST_COMPUTE, training=False
        )
        for chosen in (attention, replace(attention, reduced=spilled))
    )
    assert (sharded - fused) * 1e6 == pytest.approx([0, 8 * 8 * 6])


def test_a_grouped_product_sums_one_group() -> None:
    # 6 groups of 64 rows in all, each with a matrix of its own.
    grouped = rule("rk,gkn", "rn", flops=2.0 / 6, contracted="k", r=64, k=96, g=6, n=160)
    inputs = [tensor(grouped, "rk"), tensor(grouped, "gkn")]
    found = operator_times(
        grouped, whole(grouped), inputs, [tensor(grouped, "rn")], FAST_MEMORY, training=False
    )
    assert found[0] == pytest.approx(2 * 64 * 96 * 160 / (1e9 * efficiency(96, 64, 160)) + 0.5)


def test_a_convolution_has_the_extents_of_its_matrix_product() -> None:
    # 8 images of 3 channels and 10 rows, 5 kernels of 3 rows; "r" are the 8 rows made.
    convolution = rule("nch,ocw", "nor", flops=2.0 / 10, n=8, c=3, h=10, o=5, w=3, r=8)
    inputs = [tensor(convolution, "nch"), tensor(convolution, "ocw")]
    outputs = [tensor(convolution, "nor")]
    found = operator_times(
        convolution, whole(convolution), inputs, outputs, FAST_MEMORY, training=False
    )
    flops = 2 * 8 * 3 * 5 * 3 * 8
    assert found[0] == pytest.approx(flops / (1e9 * efficiency(3 * 3, 8 * 8, 5)) + 0.5)


def test_an_empty_tensor_costs_a_launch() -> None:
    empty = rule("mk,kn", "mn", contracted="k", m=0, k=4, n=5)
    inputs, outputs = [tensor(empty, "mk"), tensor(empty, "kn")], [tensor(empty, "mn")]
    found = operator_times(empty, whole(empty), inputs, outputs, FAST_COMPUTE, training=False)
    assert found[0] == pytest.approx(0.5, abs=1e-4)


def test_a_vector_product_is_bound_by_memory_on_a_gpu() -> None:
    gemv = rule("mk,nk", "mn", contracted="k", m=1, k=4096, n=4096)
    gpu = Device("gpu", {"float32": 66.9e12, "bfloat16": 989.4e12}, 3.35e12, 80 * 10**9)
    inputs = [tensor(gemv, "mk", DType.BFLOAT16), tensor(gemv, "nk", DType.BFLOAT16)]
    outputs = [tensor(gemv, "mn", DType.BFLOAT16)]
    found = operator_times(gemv, whole(gemv), inputs, outputs, gpu, training=False)
    assert found[0] == pytest.approx(2 * (4096 + 4096**2 + 4096) / 3.35e12)


@given(
    extents=st.lists(st.sampled_from([4, 8, 64, 512, 4096]), min_size=4, max_size=4),
    mesh=st.sampled_from([(2,), (4,), (2, 2), (2, 4)]),
    training=st.booleans(),
)
def test_no_strategy_costs_more_than_the_whole_operator(
    extents: list[int], mesh: tuple[int, ...], training: bool
) -> None:
    matmul = rule("bsk,nk", "bsn", contracted="k", **dict(zip("bskn", extents, strict=True)))
    found = strategies(matmul, mesh)
    times = operator_times(
        matmul,
        found,
        [tensor(matmul, "bsk", grad=True), tensor(matmul, "nk", grad=True)],
        [tensor(matmul, "bsn", grad=True)],
        DEVICE,
        training=training,
    )
    points = np.array([np.prod(list(s.sizes.values())) for s in found])
    replicated = times[points == points.max()]
    assert times.shape == (len(found),)
    assert np.ptp(replicated) <= 1e-9 * replicated[0]
    assert (times <= replicated[0] * (1 + 1e-9)).all()
    assert (times > 0).all()


FITTED = replace(
    DEVICE,
    operators={
        "aten.add.Tensor": OperatorFit(RooflineFit(0.25, 2.0), RooflineFit(0.125, 0.0)),
        "stream": OperatorFit(RooflineFit(3.0, 1.0), RooflineFit(4.0, 1.0)),
        "contraction": OperatorFit(RooflineFit(0.5, 3.0), RooflineFit(0.25, 1.5)),
        "view": OperatorFit(RooflineFit(0.0625, 0.0), RooflineFit(0.5, 2.0)),
    },
)


def fitted(name: str, *, training: bool = True, is_view: bool = False) -> float:
    """Seconds of an addition of two tensors on the device with fits."""
    inputs, outputs = [tensor(ADD, "ij", grad=True)] * 2, [tensor(ADD, "ij")]
    found = operator_times(
        ADD, whole(ADD), inputs, outputs, FITTED, training=training, name=name, is_view=is_view
    )
    return float(found[0])


def test_an_operator_that_was_measured_takes_its_own_time() -> None:
    forward = 3 * 40_000 / 1e6
    assert fitted("aten.add.Tensor", training=False) == pytest.approx(0.25 + 2 * forward)
    assert fitted("aten.add.Tensor") == pytest.approx(0.25 + 2 * forward + 0.125)


def test_others_take_what_their_category_does() -> None:
    forward, backward = 3 * 40_000 / 1e6, 5 * 40_000 / 1e6
    assert fitted("aten.sub.Tensor") == pytest.approx(3 + forward + 4 + backward)
    assert fitted("aten.view.default", is_view=True) == pytest.approx(0.0625 + 0.5 + 2 * backward)


def test_a_contraction_takes_a_multiple_of_its_roofline() -> None:
    inputs = [tensor(LINEAR, "bsk", grad=True), tensor(LINEAR, "nk", grad=True)]
    outputs = [tensor(LINEAR, "bsn")]
    device = replace(FITTED, memory_bandwidth=1e30, tile=8.0)
    found = operator_times(LINEAR, whole(LINEAR), inputs, outputs, device, training=True)
    share = MATMUL_EFFICIENCY * float(np.prod([e / (e + 8) for e in (96, 128, 160)]))
    once = FLOPS / (1e9 * share)
    assert found[0] == pytest.approx(0.5 + 3 * once + 0.25 + 1.5 * 2 * once)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "aten.scaled_dot_product_attention.default"),
        ({"dropout_p": 0.0}, "aten.scaled_dot_product_attention.default"),
        ({"is_causal": True}, "aten.scaled_dot_product_attention.default causal"),
        (
            {"dropout_p": 0.1, "is_causal": True},
            "aten.scaled_dot_product_attention.default causal drawing",
        ),
    ],
    ids=["plain", "no dropout", "causal", "causal with dropout"],
)
def test_attention_goes_by_the_kernel_that_it_takes(
    arguments: dict[str, Argument], name: str
) -> None:
    call = Call("aten.scaled_dot_product_attention.default", tuple(arguments.items()), (), ())
    assert efficiency_key(call) == name
