"""Rates of kernels by GPU generation, and the published measurements that they follow.

* matmul: the maximum achievable matmul FLOP/s (Bekman, "Machine Learning Engineering") are 271
  TFLOP/s in bfloat16 on A100, 794 on H100, 1745 on B200, 1769 on B300 and 1822 on GB200; in float8
  1403 on H100, 3433 on B200, 3353 on B300 and 3616 on GB200. They are the best of thousands of
  shapes, run one at a time. A series of large products runs at the clock that the power limit
  allows: 716 on H100 for extents of 8192 (cuBLAS; Shankhdhar, "Outperforming cuBLAS on H100"), in
  float8 1358 on H800 (DeepGEMM, README of February 2025) and 2850 on B200 (triton-lang/triton, pull
  request 9044). The fractions are such that prices are between the two. float32 without TF32: 18.9
  of 19.5 on A100 (Yinghan-Li/YHs_Sample, issue 4).
* exposed writes: rates by shape of DeepGEMM on Hopper. On Blackwell accumulators are in tensor
  memory, and products of few terms are among the best.
* memory: 2.67 of 3.35 TB/s, launch included, on H800 (DeepGEMM); 6.7 of 8 TB/s on B200
  (NVIDIA/cccl, pull request 7391).
* FlashAttention-2, FlashAttention-3 in forward, and cuDNN on Hopper: plots of
  Dao-AILab/flash-attention (assets/flash2_*.png, flash3_fp16_fwd.png). FlashAttention-3 in
  backward: Shah and others, "FlashAttention-3" (2024), section 4.
* FlashAttention-1, in Triton: in forward 1.45 times as long as FlashAttention-2, in backward 2.2
  times. Dao ("FlashAttention-2", 2023, section 4.1) measured 1.3 to 1.5 times, and around 2 times.
  Within these ranges they were fitted to the steps of llm-foundry's 7b on 8 H100 with sequences of
  32,768 and 65,536 tokens (llmf-035, llmf-036 of benchmarks/published/runs.csv). The plots of
  FlashAttention-1 in CUDA agree within 15 % but for head sizes of 128 on H100, where they have 20 %
  less.
* FlashAttention-4 and cuDNN on Blackwell: Dao-AILab/flash-attention, pull requests 2605 and 2280;
  in a training step less (Bekman, "When to upgrade GPUs").
* GB300: fractions of GB200.
* MI300X: the maximum achievable matmul FLOP/s (Bekman) are 782 of 1300 TFLOP/s in bfloat16 under
  ROCm 6.2. Other fractions were not measured: float8 has that of bfloat16, memory that of Hopper,
  and attention is priced as its matrix products.
* clock: of B200 and GB200 in a training step, relative to the runs of single kernels above:
  published steps of Llama 3.1 405B on GB200 (NVIDIA/dgxc-benchmarking v25.05) and of Llama 3 8B on
  B200 (Megatron-Bridge 25.09 and 25.11), bfloat16 and float8 alike. Those on H100 and GB300 are at
  1.
* dispatch: a round estimate for PyTorch's eager mode with autograd.
* eager and contention: fitted to llm-foundry's steps in bfloat16 without checkpointing on fewer
  than 128 H100 (19 of the rows llmf-031 to llmf-070). NCCL's kernels hold 24 of 108
  multiprocessors of an A100 and up to 32 of 132 of an H100; the rest of the contention are copies
  to and from the buffers of collectives. Other devices are given the same.
* power: datasheets.
"""

from dataclasses import replace

from autoshard.mesh.topology import AttentionRate, KernelRates

_DISPATCH = 6e-6
_HEAD_SIZES = (64, 128, 256)
_CAUSAL = 0.96
_EAGER = 0.4
_CONTENTION = 0.5
_IDLE = 0.2
"""Fraction of the power limit that a GPU draws without work."""


def clock_at(watts: float, rated: float) -> float:
    """Fraction of the clock at a lower power limit.

    Dynamic power grows with the clock times the square of the voltage, and the voltage with the
    clock, so the clock goes with the cube root of what the limit leaves above idle.

    Args:
        watts: the power limit.
        rated: the limit at full clock.
    """
    left = (watts / rated - _IDLE) / (1 - _IDLE)
    return float(min(max(left, _IDLE), 1.0) ** (1 / 3))


def _attention(
    forward: tuple[float, float, float], backward: tuple[float, float, float], keys: float
) -> AttentionRate:
    """A kernel's rate by TFLOP/s for head sizes of 64, 128 and 256."""
    return AttentionRate(
        _HEAD_SIZES,
        tuple(rate * 1e12 for rate in forward),
        tuple(rate * 1e12 for rate in backward),
        keys,
        _CAUSAL,
    )


def _first(second: AttentionRate) -> AttentionRate:
    """The rate of FlashAttention-1 by that of FlashAttention-2."""
    return replace(
        second,
        forward=tuple(rate / 1.45 for rate in second.forward),
        backward=tuple(rate / 2.2 for rate in second.backward),
    )


_AMPERE_FA2 = _attention((198, 228, 215), (175, 198, 170), 190)

AMPERE = KernelRates(
    multiprocessors=108,
    matmul={"bfloat16": 0.85, "float16": 0.85, "float32": 0.95, "float64": 0.95},
    memory=0.88,
    exposed_writes=1.0,
    attention={"flash_attention_2": _AMPERE_FA2, "flash_attention_1": _first(_AMPERE_FA2)},
    dispatch=_DISPATCH,
    power=400.0,
    eager=_EAGER,
    contention=_CONTENTION,
)

_HOPPER_FA2 = _attention((345, 375, 345), (298, 345, 310), 175)

HOPPER = KernelRates(
    multiprocessors=132,
    matmul={
        "bfloat16": 0.77,
        "float16": 0.77,
        "float8_e4m3fn": 0.72,
        "float8_e5m2": 0.72,
        "float32": 0.78,
        "float64": 0.85,
    },
    memory=0.88,
    exposed_writes=1.0,
    attention={
        "flash_attention_2": _HOPPER_FA2,
        "flash_attention_3": _attention((515, 680, 710), (430, 560, 450), 185),
        "cudnn_attention": _attention((440, 620, 560), (430, 560, 450), 130),
        "flash_attention_1": _first(_HOPPER_FA2),
    },
    dispatch=_DISPATCH,
    power=700.0,
    eager=_EAGER,
    contention=_CONTENTION,
)


def _blackwell(
    multiprocessors: int, half: float, eighth: float, watts: float, clock: float = 1.0
) -> KernelRates:
    return KernelRates(
        multiprocessors=multiprocessors,
        matmul={
            "bfloat16": half,
            "float16": half,
            "float8_e4m3fn": eighth,
            "float8_e5m2": eighth,
            "float32": 0.85,
            "float64": 0.85,
        },
        memory=0.84,
        exposed_writes=0.0,
        attention={
            "flash_attention_4": _attention((1200, 1600, 1400), (900, 1150, 900), 150),
            "flash_attention_2": _HOPPER_FA2,
            "cudnn_attention": _attention((1160, 1550, 1300), (900, 1150, 900), 130),
        },
        dispatch=_DISPATCH,
        power=watts,
        clock=clock,
        eager=_EAGER,
        contention=_CONTENTION,
    )


B200 = _blackwell(148, 0.72, 0.69, 1000.0, clock=0.80)
B300 = _blackwell(148, 0.73, 0.68, 1100.0)
GB200 = _blackwell(152, 0.70, 0.69, 1200.0, clock=0.78)
GB300 = _blackwell(152, 0.70, 0.69, 1400.0)

CDNA3 = KernelRates(
    multiprocessors=304,
    matmul={"bfloat16": 0.6, "float16": 0.6, "float32": 0.78, "float64": 0.78},
    memory=0.88,
    exposed_writes=1.0,
    attention={},
    dispatch=_DISPATCH,
    power=750.0,
    eager=_EAGER,
    contention=_CONTENTION,
)
