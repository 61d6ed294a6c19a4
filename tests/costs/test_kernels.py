"""Prices of kernels on GPUs whose rates are known, against published measurements."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.costs import Execution, operator_times
from autoshard.errors import MeshError
from autoshard.graph import DType, Ref, Tensor
from autoshard.mesh import (
    AttentionRate,
    Device,
    KernelRates,
    OperatorFit,
    RooflineFit,
    get_topology,
)
from autoshard.mesh.kernel_presets import HOPPER, clock_at
from autoshard.ops import Call, Strategy, rule_for
from autoshard.pricing.prices import with_attention

RATES = Path(__file__).parents[2] / "benchmarks/published/rates.csv"
PRESETS = {
    "A100-80GB": "a100-sxm-80gb",
    "A100-SXM": "a100-sxm-80gb",
    "H100-80GB": "h100-sxm",
    "H100-SXM (H200 same)": "h100-sxm",
    "H100-SXM": "h100-sxm",
    "H200": "h200-sxm",
    "B200": "b200-sxm",
    "B300": "b300-sxm",
    "GB200": "gb200-nvl72",
}
ATTENTION = {
    "FlashAttention-2": "flash_attention_2",
    "FlashAttention-3 fp16": "flash_attention_3",
    "cuDNN fp16": "cudnn_attention",
    "PyTorch unfused": "math",
}
H100 = get_topology("h100-sxm").device
EAGER = Execution()
BF16, FP8 = DType.BFLOAT16, DType.FLOAT8_E4M3FN

SDPA = "aten.scaled_dot_product_attention.default"


def seconds(
    operator: str,
    arguments: dict[str, Any],
    output: Tensor,
    device: Device,
    *,
    training: bool = False,
    sharded: Sequence[dict[str, int]] = ({},),
    execution: Execution = EAGER,
) -> list[float]:
    inputs = tuple(value for value in arguments.values() if isinstance(value, Tensor))
    given = tuple(
        (name, Ref(name) if isinstance(value, Tensor) else value)
        for name, value in arguments.items()
    )
    rule = rule_for(Call(operator, given, inputs, (output,)))
    chosen = [Strategy((), (), {**rule.sizes, **sizes}) for sizes in sharded]
    found = operator_times(
        rule, chosen, inputs, (output,), device, training=training, execution=execution
    )
    return [float(x) for x in found]


def product(
    m: int,
    n: int,
    k: int,
    dtype: DType = BF16,
    device: Device = H100,
    *,
    training: bool = False,
    execution: Execution = EAGER,
) -> float:
    factors = {"self": Tensor((m, k), dtype, training), "mat2": Tensor((k, n), dtype, training)}
    output = Tensor((m, n), BF16)
    return seconds(
        "aten.mm.default", factors, output, device, training=training, execution=execution
    )[0]


def attention(
    heads: int, length: int, size: int, device: Device, *, causal: bool, training: bool = False
) -> float:
    head = Tensor((1, heads, length, size), BF16, training)
    arguments = {"query": head, "key": head, "value": head, "is_causal": causal}
    return seconds(SDPA, arguments, head, device, training=training)[0]


def _at_full_clock(device: Device) -> Device:
    """The device as in runs of single kernels, which the power limit hardly slows."""
    assert device.kernels is not None
    return replace(device, kernels=replace(device.kernels, clock=1.0))


def published() -> Iterator[tuple[str, float, float]]:
    """Name, predicted and published FLOP/s of products and attention."""
    with RATES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        known = row["kind"] == "matmul" or row["kernel_or_collective"] in ATTENTION
        if row["gpu"] not in PRESETS or not known:
            continue
        device = _at_full_clock(get_topology(PRESETS[row["gpu"]]).device)
        shape, passes = row["shape_or_size"], row["pass_or_ranks"]
        if row["kind"] == "matmul":
            m, n, k = map(int, shape.split("x"))
            rate = 2 * m * n * k / product(m, n, k, BF16 if passes == "bf16" else FP8, device)
        else:
            rate = attention_rate(row["kernel_or_collective"], shape, passes, device)
        name = f"{row['gpu']} {row['kernel_or_collective']} {passes} {shape}"
        yield name, rate, 1e12 * float(row["value"])


def attention_rate(kernel: str, shape: str, passes: str, device: Device) -> float:
    """FLOP/s of attention with 2048 features and 16384 tokens, as FlashAttention counts them."""
    found = re.match(r"head_dim (\d+), causal=(\d), seq (\d+)(k?)", shape)
    assert found is not None
    size, causal, number, thousands = found.groups()
    length, heads = int(number) * (1024 if thousands else 1), 2048 // int(size)
    device = with_attention(device, ATTENTION[kernel])
    training, is_causal = passes == "fwd+bwd", causal == "1"
    flops = 4 * 16384 * 2048 * length * (3.5 if training else 1) / (2 if is_causal else 1)
    return flops / attention(
        heads * 16384 // length,
        length,
        int(size),
        device,
        causal=is_causal,
        training=training,
    )


def test_published_rates_are_predicted() -> None:
    errors = {name: predicted / found - 1 for name, predicted, found in published()}
    off = {name: round(error, 3) for name, error in errors.items() if abs(error) > 0.15}
    assert len(errors) == 111
    assert len(off) <= 0.05 * len(errors), off
    assert np.median(np.abs(list(errors.values()))) < 0.04


# M, N, K and TFLOP/s of DeepGEMM (README, February 2025) in float8 on H800, whose compute is that
# of H100. No constant of the presets was fitted to these shapes.
DEEP_GEMM = [
    (64, 24576, 1536, 289),
    (64, 32768, 512, 219),
    (64, 7168, 16384, 336),
    (64, 4096, 7168, 287),
    (128, 24576, 1536, 535),
    (128, 7168, 16384, 645),
    (128, 4096, 7168, 533),
    (4096, 2112, 7168, 1058),
    (4096, 24576, 1536, 990),
    (4096, 32768, 512, 590),
    (4096, 7168, 16384, 1358),
    (4096, 4096, 7168, 1304),
    (4096, 7168, 2048, 1025),
]


def test_products_of_few_rows_or_terms_are_slow_as_measured() -> None:
    errors = [2e-12 * m * n * k / product(m, n, k, FP8) / rate - 1 for m, n, k, rate in DEEP_GEMM]
    assert np.max(np.abs(errors)) < 0.21
    assert np.median(np.abs(errors)) < 0.06


def test_a_partly_filled_wave_costs_a_full_one() -> None:
    """132 tiles of 256 x 128 fill all multiprocessors; one more needs another wave."""
    full, more = product(256, 128 * 132, 8192), product(256, 128 * 133, 8192)
    assert more > 1.2 * full


def test_a_product_of_few_tiles_splits_its_sum() -> None:
    """With one tile of 64 x 64 there would be one multiprocessor of 132 at work."""
    launch = H100.launch_overhead
    one, many = product(64, 64, 1 << 17), product(64, 64, 1 << 16)
    assert (one - launch) < 2 * 64 * 64 * (1 << 17) / (989.4e12 * 0.77 / 132) / 8
    assert one - launch == pytest.approx(2 * (many - launch), rel=0.1)


# Rows, terms and columns of products in bfloat16, and TFLOP/s of forward and of both gradients, on
# an H200 with PyTorch 2.11 (cuBLAS 13.0). Its compute is that of H100.
UNALIGNED = [
    (8192, 768, 1001, (88, 113, 114)),
    (4096, 1600, 1001, (102, 107, 117)),
    (8192, 2048, 1001, (101, 126, 127)),
    (8192, 768, 1002, (222, 175, 187)),
    (4096, 1600, 1002, (241, 177, 176)),
    (8192, 2048, 1004, (258, 237, 251)),
]


def test_products_of_rows_that_are_not_aligned_are_slow_as_measured() -> None:
    ratios = []
    for rows, terms, columns, rates in UNALIGNED:
        flops = 2e-12 * rows * terms * columns
        step = product(rows, columns, terms, BF16, training=True)
        ratios.append(step / sum(flops / rate for rate in rates))
        assert step > 2 * product(rows, 1000, terms, BF16, training=True)
    assert min(ratios) > 0.8
    assert max(ratios) < 1.25


def test_only_16_bit_products_of_eager_mode_need_aligned_rows() -> None:
    """Inductor pads, and products in float32 use other units."""
    for dtype, execution in ((BF16, Execution(is_compiled=True)), (DType.FLOAT32, Execution())):
        odd, even = (
            product(8192, columns, 768, dtype, execution=execution) for columns in (50257, 50256)
        )
        assert odd == pytest.approx(even, rel=0.01)


def test_gradients_of_a_product_have_its_extents_in_another_order() -> None:
    """A product with few terms writes more than it computes; its gradients have few rows."""
    both = product(8192, 8192, 128, training=True) - product(8192, 8192, 128)
    wide = product(8192, 128, 8192)
    assert both == pytest.approx(2 * wide, rel=1e-6)


def test_backward_of_attention_has_two_and_a_half_times_the_flops() -> None:
    rates = H100.kernels
    assert rates is not None
    same = AttentionRate((128,), (300e12,), (300e12,), 0.0)
    device = replace(H100, kernels=replace(rates, attention={"flash_attention_2": same}))
    forward = attention(132, 16384, 128, device, causal=False)
    both = attention(132, 16384, 128, device, causal=False, training=True)
    assert both == pytest.approx(3.5 * forward, rel=1e-3)


def test_scores_of_unfused_attention_go_through_memory() -> None:
    """Two products and three passes, forward; masked scores are computed too."""
    device = with_attention(H100, "math")
    assert H100.kernels is not None
    scores = 2 * 16 * 8192 * 8192 / (3.35e12 * H100.kernels.memory)
    found = attention(16, 8192, 128, device, causal=False)
    assert 6 * scores + 2 * scores < found < 6 * scores + 3.5 * scores
    assert attention(16, 8192, 128, device, causal=True) == found
    assert found > 4 * attention(16, 8192, 128, H100, causal=False)


def test_ranks_with_few_heads_split_keys() -> None:
    """One block of queries is divided among multiprocessors; without, it would take 132 times."""
    many = attention(132, 128, 128, H100, causal=False)
    assert attention(1, 128, 128, H100, causal=False) <= many


def test_a_small_operator_takes_as_long_as_the_host_needs_to_run_it() -> None:
    assert H100.kernels is not None
    few, many = (
        seconds("aten.neg.default", {"self": Tensor((n,), BF16)}, Tensor((n,), BF16), H100)[0]
        for n in (16, 1 << 28)
    )
    assert few == H100.kernels.dispatch
    # Kernels that are longer than a launch hide the next one.
    assert many == pytest.approx(4 * (1 << 28) / H100.eager_bandwidth, rel=0.01)


def test_a_lower_power_limit_slows_computation_only() -> None:
    assert clock_at(700.0, 700.0) == 1.0
    assert clock_at(500.0, 700.0) == pytest.approx((500 / 700 - 0.2) ** (1 / 3) / 0.8 ** (1 / 3))
    slow = replace(H100, kernels=replace(HOPPER, clock=0.5))
    assert product(8192, 8192, 8192, device=slow) > 1.9 * product(8192, 8192, 8192)
    assert product(1, 8192, 8192, device=slow) == product(1, 8192, 8192)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matmul": {"bfloat16": 1.5}}, r"matmul\['bfloat16'\] of kernels is 1.5"),
        ({"matmul": {"float16": 0.5}}, "no matmul fraction for bfloat16"),
        ({"memory": 0.0}, "memory of kernels is 0.0"),
        ({"clock": 2.0}, "clock of kernels is 2.0; it must be at most 1"),
        ({"eager": 0.0}, "eager of kernels is 0.0"),
        ({"contention": 1.5}, "contention of kernels is 1.5"),
        ({"attention": {"flash": HOPPER.attention["flash_attention_2"]}}, "'flash' is unknown"),
        ({"multiprocessors": 0}, "multiprocessors of kernels is 0"),
    ],
)
def test_impossible_rates_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        replace(HOPPER, **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (), (), 1.0), "positive and ascending"),
        (((64, 64), (1.0, 1.0), (1.0, 1.0), 1.0), "positive and ascending"),
        (((64,), (1.0, 2.0), (1.0,), 1.0), "a forward and a backward rate for each"),
        (((64,), (0.0,), (1.0,), 1.0), "rate of attention is 0.0"),
    ],
)
def test_impossible_attention_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        AttentionRate(*arguments)


def test_devices_without_rates_keep_the_fixed_efficiency() -> None:
    """Calibrated devices have fits of their own, and CPUs no known kernels."""
    assert get_topology("cpu-100gbe").device.kernels is None
    rates: KernelRates | None = H100.kernels
    assert rates is not None
    assert rates.matmul_efficiency("float16") == 0.77
    assert rates.matmul_efficiency("complex64") == 0.77


def add(execution: Execution, device: Device = H100) -> float:
    """Seconds of an addition of two tensors of 64 MiB in training."""
    tensor = Tensor((1 << 25,), BF16, requires_grad=True)
    arguments = {"self": tensor, "other": tensor}
    call = Call("aten.add.Tensor", tuple((k, Ref(k)) for k in arguments), (tensor,) * 2, (tensor,))
    rule = rule_for(call)
    chosen = [Strategy((), (), rule.sizes)]
    found = operator_times(
        rule, chosen, call.inputs, call.outputs, device, training=True, execution=execution
    )
    return float(found[0])


def test_eager_streams_take_longer_than_compiled_ones() -> None:
    assert H100.kernels is not None
    launches = 2 * H100.launch_overhead
    compiled = add(Execution(is_compiled=True)) - launches
    assert add(Execution()) - launches == pytest.approx(compiled / H100.kernels.eager)
    same = replace(H100, kernels=replace(H100.kernels, eager=1.0))
    assert add(Execution(), same) == add(Execution(is_compiled=True), same)


def test_the_first_flash_attention_is_slower_in_both_passes() -> None:
    """Dao (2023, section 4.1): 1.3 to 1.5 times in forward, around 2 times in backward."""
    for preset in ("a100-sxm-80gb", "h100-sxm"):
        device = get_topology(preset).device
        first, second = (
            [
                attention(16, 16384, 128, with_attention(device, name), causal=True, training=both)
                for both in (False, True)
            ]
            for name in ("flash_attention_1", "flash_attention_2")
        )
        assert 1.3 < first[0] / second[0] < 1.5
        assert 2.0 < (first[1] - first[0]) / (second[1] - second[0]) < 2.3


def test_a_fused_operator_moves_what_its_kernel_does_not_have() -> None:
    """Of the sum and its two inputs, each is read or written, and so is its gradient."""
    assert H100.kernels is not None
    one = (1 << 26) / (3.35e12 * H100.kernels.memory)
    launches = 2 * H100.launch_overhead
    assert add(Execution(is_compiled=True)) == pytest.approx(8 * one + launches)
    first = Execution(is_compiled=True, launches=False, unwritten=frozenset({0}))
    assert add(first) == pytest.approx(6 * one)
    last = Execution(is_compiled=True, unread=frozenset({0}))
    assert add(last) == pytest.approx(5 * one + launches)


def test_a_fused_operator_has_no_overhead_of_its_own() -> None:
    fits = OperatorFit(RooflineFit(0.25, 1.0), RooflineFit(0.5, 1.0))
    device = replace(H100, operators={"stream": fits})
    fused = add(Execution(is_compiled=True, launches=False), device)
    assert add(Execution(is_compiled=True), device) == pytest.approx(0.75 + fused)


def linear(execution: Execution) -> float:
    activation, weight = (Tensor((8192, 8192), BF16, requires_grad=True) for _ in range(2))
    inputs = (activation, weight)
    arguments = (("input", Ref("input")), ("weight", Ref("weight")))
    rule = rule_for(Call("aten.linear.default", arguments, inputs, (activation,)))
    chosen = [Strategy((), (), rule.sizes)]
    found = operator_times(
        rule, chosen, inputs, (activation,), H100, training=True, execution=execution
    )
    return float(found[0])


def test_products_in_float8_pay_for_their_casts() -> None:
    assert H100.kernels is not None
    products = 3 * product(8192, 8192, 8192, FP8)
    tensor = 2 * 8192 * 8192 / (3.35e12 * H100.kernels.memory)
    # Of activation, weight and the gradient of the output: read, and written twice in half. All
    # are read before, for their largest elements.
    launch = H100.launch_overhead
    eager = linear(Execution(in_float8=True))
    assert eager == pytest.approx(products + 3 * (3 * tensor + 2 * launch))
    # Compiled, activations are written in float8 by what computes them.
    compiled = linear(Execution(is_compiled=True, in_float8=True))
    assert compiled == pytest.approx(products + 2 * (2 * tensor + launch))
    assert eager < linear(Execution())
