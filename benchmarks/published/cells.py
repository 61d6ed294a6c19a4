"""Readers of cells with free text: software, kernels, precision, groups of ranks, recomputation."""

import re
from collections.abc import Mapping

from benchmarks.published.rows import Row

_MEGATRON = ("Megatron", "NeMo", "MegaScale")
_OTHER_STACKS = ("AutoModel", "DeepSpeed")
"""Words of the column `framework`: stacks that run Megatron-Core's layers and optimizer, and those
that do not although their names are alike (NeMo AutoModel is PyTorch's FSDP; Megatron-DeepSpeed has
Megatron-LM's layers)."""
_ATTENTION: Mapping[str, str] = {
    "FlashAttention-1": "flash_attention_1",
    "FlashAttention-2": "flash_attention_2",
    "FlashAttention-3": "flash_attention_3",
    "FA2": "flash_attention_2",
    "FA3": "flash_attention_3",
    "FA4": "flash_attention_4",
    "FlashAttention-4": "flash_attention_4",
    "cuDNN": "cudnn_attention",
    "TE fused attention": "cudnn_attention",
    "Transformer Engine": "cudnn_attention",
}
"""Attention kernels by words of the column `compile_kernels_attn`; the first that occurs counts."""
_FULLY_SHARDED = re.compile(
    r"FSDP|HSDP|ZERO[- ]?(STAGE[- ]?)?[23]\b|(FULL|HYBRID)[- ]SHARD|SHARD GRAD OP", re.IGNORECASE
)
_KEEPS_GATHERED = re.compile(r"SHARD GRAD OP|ZERO[- ]?(STAGE[- ]?)?2\b", re.IGNORECASE)
_PARTS: Mapping[str, int] = {"other": 2, "second": 2, "third": 3, "fourth": 4}
_LATE_TABLE_GPUS = 128
"""Fewest GPUs of the latest table of llm-foundry."""
_HGX_GPUS = 8
"""GPUs of a node of NVIDIA HGX."""


def is_megatron(row: Row) -> bool:
    """True if Megatron-Core, or what it was made of, runs layers and optimizer."""
    framework = row["framework"]
    others = _OTHER_STACKS[:1] if "Megatron" in framework else _OTHER_STACKS
    is_other = any(name.lower() in framework.lower() for name in others)
    return not is_other and any(name in framework for name in _MEGATRON)


def reduces_in_bfloat16(row: Row) -> bool:
    """True if gradients are reduced in bfloat16.

    If the row does not say it, they are with NeMo's recipes since 2024 (`grad_sync_dtype: bf16` in
    the yaml files of NVIDIA/dgxc-benchmarking, `grad_reduce_in_fp32 = False` in the scripts of
    NeMo 2), and with the recommended configuration of Megatron FSDP (`--grad-reduce-in-bf16` in
    its user guide).
    """
    text = row["precision"]
    stated = re.search(r"\breduc\w*( in)? bf16|\bbf16 (grad\w* )?reduc", text)
    if "PURE" in text or "bf16 params/grads" in text or stated is not None:
        return True
    if re.search(r"\b(fp32|float32) (grad\w* )?(accum|reduc)", text):
        return False
    is_recipe = re.match(r"NeMo (2 |2[4-9]\.|\(DGX)", row["framework"]) is not None
    return is_recipe or "Megatron FSDP" in row["dp_variant"]


def attention_kernel(row: Row) -> str:
    """The kernel of attention; `auto` if it is not stated."""
    if "llm-foundry" in row["framework"]:
        return _attention_of_llm_foundry(row)
    kernels = row["compile_kernels_attn"]
    found = next((kernel for text, kernel in _ATTENTION.items() if text in kernels), "auto")
    has_engine = re.search(r"\bTE\b", kernels) is not None
    return "cudnn_attention" if found == "auto" and has_engine else found


def _attention_of_llm_foundry(row: Row) -> str:
    """The kernel by the scripts of the source's tables.

    Those of May and October 2023 run FlashAttention in Triton (sweep.sh); that of January 2024, on
    128 H100 and more, FlashAttention-2 but for the models 13b and 30b (sweep.py).
    """
    late = row["gpu_type"].startswith("H100") and (row.number("gpus") or 0) >= _LATE_TABLE_GPUS
    in_triton = not late or row["model"] in {"MPT-13b", "MPT-30b"}
    return "flash_attention_1" if in_triton else "flash_attention_2"


def has_fused_attention(row: Row) -> bool:
    """False if attention writes its matrix of probabilities."""
    words = ("no FlashAttention", "without FlashAttention", "no flash")
    return not any(text in row["compile_kernels_attn"] for text in words)


def is_compiled(row: Row) -> bool:
    """True if layers run as fused kernels: those of a compiler, of XLA or of Megatron-LM."""
    kernels = row["compile_kernels_attn"].lower()
    if "eager" in kernels or re.search(r"\b(no|without) (torch\.)?compile", kernels):
        return False
    is_fused = any(word in kernels for word in ("compile", "fused", "transformer engine", "xla"))
    return is_fused or is_megatron(row)


def is_in_float8(row: Row) -> bool:
    """True if linear layers multiply in float8."""
    return re.search(r"(?<!no )(FP8|FLOAT8)", row["precision"].upper()) is not None


def overlaps_activations(row: Row) -> bool:
    """True if collectives of tensor parallelism overlap with the products that need them.

    Transformer Engine has userbuffers and a ring of keys and values, PyTorch asynchronous tensor
    parallelism (torchtitan).
    """
    kernels = row["compile_kernels_attn"]
    is_async = re.search(
        r"(?<!no )\basync[- ]?(TP|tensor)", f"{kernels} {row['dp_variant']}", re.IGNORECASE
    )
    return is_async is not None or (is_megatron(row) and "Transformer Engine" in kernels)


def is_sequence_parallel(row: Row) -> bool:
    """True for sequence parallelism beside tensor parallelism, which torchtitan always has."""
    text = row["sp"].lower()
    return text in {"yes", "true", "1"} or (not text and "torchtitan" in row["framework"].lower())


def shares_matrices(row: Row) -> bool:
    """True if tensor-parallel ranks share the matrices of an expert.

    They do by default in Megatron-Core (expert_tensor_parallel_size in model_parallel_config.py).
    The recipes of Megatron-Bridge, and NeMo's of DeepSeek-V3, set 1.
    """
    stated = re.search(r"\bETP ?(\d+)", f"{row['ep']} {row['notes']}")
    if stated:
        return int(stated[1]) > 1
    return is_megatron(row) and "Bridge" not in row["framework"] and "DeepSeek" not in row["model"]


def sends_tokens_once(row: Row) -> bool:
    """True if tokens are sent once to a node, or to a rank of a node, as by DeepEP and HybridEP.

    Recipes of Megatron-Bridge and NeMo have one of these, but for those of Qwen3 235B on nodes of
    eight GPUs, which have NCCL's all-to-all (qwen3_llm_pretrain.py).
    """
    kernels = row["compile_kernels_attn"].lower()
    if re.search(r"(deep|hybrid)ep\b", kernels):
        return True
    return is_megatron(row) and "all-to-all" not in kernels and not _has_all_to_all_recipe(row)


def overlaps_dispatch(row: Row) -> bool:
    """True if tokens are sent while another micro-batch is computed.

    So does the recipe of Megatron-Bridge for Qwen3 235B on H100 (`moe_a2a_overlap`).
    """
    is_stated = "EP overlap" in row["compile_kernels_attn"]
    return is_stated or (_has_all_to_all_recipe(row) and "H100" in row["gpu_type"])


def _has_all_to_all_recipe(row: Row) -> bool:
    is_qwen = re.search(r"qwen.*235b", row["model"], re.IGNORECASE) is not None
    is_hgx = row.number("gpus_per_node") == _HGX_GPUS
    return is_qwen and is_hgx and "Bridge" in row["framework"]


def is_fully_sharded(row: Row) -> bool:
    """True if parameters are sharded at rest, and gathered to compute: FSDP, ZeRO-2 and ZeRO-3."""
    return _FULLY_SHARDED.search(row["dp_variant"].replace("_", " ")) is not None


def shards_optimizer(row: Row) -> bool:
    """True for a distributed optimizer, as ZeRO-1."""
    text = row["dp_variant"].lower()
    return "no zero" not in text and re.search(r"zero|dist|shard", text) is not None


def keeps_gathered(row: Row) -> bool:
    """True if gathered parameters are kept until backward."""
    return _KEEPS_GATHERED.search(row["dp_variant"].replace("_", " ")) is not None


def shard_group(row: Row, ranks: int) -> int:
    """Number of ranks that share parameters, of all data-parallel ranks.

    The ranks of hybrid sharding are those of a node if the source says no other number.
    """
    text = row["dp_variant"]
    exception = re.search(r"\((\d+) @(\d+) GPUs\)", text)
    if exception and int(exception[2]) == ranks:
        return int(exception[1])
    stated = re.search(r"\b(?:group|FSDP|(?:dp_)?shard(?:_degree)?)[ =:]+(\d+)", text)
    if stated:
        return int(stated[1])
    stated = re.search(r"\b(?:dp_)?replica\w*[ =:]+(\d+)", text, re.IGNORECASE)
    if stated:
        return ranks // max(int(stated[1]), 1)
    is_hybrid = re.search(r"hsdp|hybrid", text, re.IGNORECASE)
    return min(row.number("gpus_per_node") or ranks, ranks) if is_hybrid else ranks


def offloads(row: Row) -> bool:
    """True if parameters, optimizer states or activations are moved to the host."""
    text = f"{row['dp_variant']}; {row['act_ckpt']}".lower()
    return re.search(r"\b(cpu|offload)", re.sub(r"\bno (cpu )?offload\w*", "", text)) is not None


def recomputed(row: Row, layers: int) -> tuple[str, ...] | None:
    """Modules whose operators are recomputed: none if None, all blocks if empty.

    Blocks may all be recomputed, or a stated share of them. What is selective is inside a fused
    attention or a fused activation, but for torchtitan's checkpoints of operators, which recompute
    every second product, about as many as the MLP has; and for Megatron-Core's modules `moe`,
    `mlp` and `moe_act`, the last of which is the activation of experts.
    """
    text = row["act_ckpt"].lower()
    share = _share(text)
    if share is not None:
        part, whole = share
        numbers = (i for i in range(layers) if (i + 1) * part // whole > i * part // whole)
        return tuple(f"layers.{i}" for i in numbers)
    if re.search(r"\b(selective|sac)\b", text):
        if re.search(r"\b(op|moe)\b(?!_)", text):
            return ("layers.*.mlp",)
        return ("layers.*.mlp.experts.out",) if re.search(r"\b(moe_)?act\b", text) else None
    is_full = re.search(r"\b(full|every block|all blocks|every layer|all layers)\b", text)
    return () if is_full and not re.match(r"(no|none|off)\b", text) else None


def _share(text: str) -> tuple[int, int] | None:
    """A stated share of blocks, as `1/3`, `1 of 3` or `every third`."""
    found = re.search(r"\b(\d+) ?(?:/|of) ?(\d+)\b", text)
    if found:
        part, whole = int(found[1]), int(found[2])
        return (part, whole) if 0 < part <= whole else None
    found = re.search(r"\bevery (\w+?)(?:nd|rd|th)? (?:block|layer)", text)
    if not found:
        return None
    whole = int(found[1]) if found[1].isdigit() else _PARTS.get(found[1], 1)
    return (1, whole) if whole > 1 else None
