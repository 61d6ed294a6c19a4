"""Published layouts as meshes and options of planning."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.mesh import Mesh, make_mesh
from autoshard.plan.options import PlanOptions
from benchmarks.published.hardware import RACK_PART, topology_of
from benchmarks.published.models import Batch, Dimensions
from benchmarks.published.public_models import dimensions_of
from benchmarks.published.rows import Row

_NO_LIMIT = "1000TB"
"""A memory budget that no plan reaches: published runs did fit."""
_TIME_LIMIT = 1200.0
_GAP = 0.02
"""Relative gap of plans: of a pinned layout little is left to decide."""

_MEGATRON = ("Megatron", "NeMo", "MegaScale")
_ACTIVATION_OVERLAP = 0.5
"""Share of the collectives of activations that Transformer Engine's userbuffers and ring attention
hide."""
_EXPERT_LAUNCH = 30e-6
"""Seconds in which the host launches a product of an expert in Transformer Engine's grouped linear
layers, with what it does around the product."""
_RELEASE_WITH_GRAPHS = 26.06
"""Release of Megatron-Bridge from which the recipes of models of experts have full CUDA graphs."""
_NOT_FUSED = ("layers.*.mlp.experts.clamp", "layers.*.mlp.experts.down_bias")
"""Modules of experts that Megatron-LM leaves to PyTorch's kernels: the clamp of the activation, and
the bias of what experts return (weighted_bias_quick_geglu_impl in
megatron/core/fusions/fused_bias_geglu.py, TEGroupedMLP._apply_bias in
megatron/core/transformer/moe/experts.py; 0.15 to 0.18). Operators that Transformer Engine fuses have
them, which recipes with full CUDA graphs use (use_transformer_engine_op_fuser)."""
_LINEAR = ("layers.*",)
"""Modules whose matrix products are in FP8; embedding and head are not among them."""
_ATTENTION: Mapping[str, str] = {
    "FlashAttention-1": "flash_attention_1",
    "FlashAttention-2": "flash_attention_2",
    "FlashAttention-3": "flash_attention_3",
    "FA3": "flash_attention_3",
    "FlashAttention-4": "flash_attention_4",
    "cuDNN": "cudnn_attention",
    "TE fused attention": "cudnn_attention",
    "Transformer Engine": "cudnn_attention",
}
"""Attention kernels by words of the column `compile_kernels_attn`; the first that occurs counts."""

_BFLOAT16_BYTES = 2
_LATE_TABLE_GPUS = 128
"""Fewest GPUs of the latest table of llm-foundry."""


class InexpressibleError(Exception):
    """A row cannot be expressed; the message is the reason."""


@dataclass(frozen=True)
class Request:
    """What to plan for a row.

    Attributes:
        dims: of the model.
        batch: of one micro-batch of all data-parallel ranks.
        reduce_dtype: element type in which gradients are reduced.
        mesh: the devices.
        options: of planning.
        assumed: what the row does not say.
    """

    dims: Dimensions
    batch: Batch
    reduce_dtype: str
    mesh: Mesh
    options: PlanOptions
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism, and micro-batches.

    Attributes:
        pipeline: pipeline ranks.
        virtual: stages of a pipeline rank.
        data: data-parallel ranks, of which groups of `expert` share the experts.
        expert: ranks on which the experts of a layer are.
        context: ranks that share a sequence.
        tensor: tensor-parallel ranks.
        micro_batch: sequences of a micro-batch of a data-parallel rank.
        micro_batches: their number in a step.
        by_sequence: True for sequence parallelism.
        experts_by_matrix: True if tensor-parallel ranks share the matrices of an expert, False if
            they have different experts.
        assumed: what the row does not say.
    """

    pipeline: int
    virtual: int
    data: int
    expert: int
    context: int
    tensor: int
    micro_batch: int
    micro_batches: int
    by_sequence: bool
    experts_by_matrix: bool
    assumed: tuple[str, ...] = field(default=())


def request_of(row: Row) -> Request:
    """What to plan for a row.

    Raises:
        InexpressibleError: the row cannot be expressed.
    """
    _check(row)
    dims = dimensions_of(row)
    if dims is None:
        raise InexpressibleError("the dimensions of the model are not public")
    if row["category"] == "inference decode TP":
        return _decoding(row, dims)
    degrees = _degrees(row)
    tokens = row.number("seq_len_tokens")
    if tokens is None:
        raise InexpressibleError("the length of a sequence is not stated")
    batch = Batch(
        degrees.micro_batch * degrees.data,
        tokens,
        fused_attention="no FlashAttention" not in row["compile_kernels_attn"]
        and "without FlashAttention" not in row["compile_kernels_attn"]
        and "no flash" not in row["compile_kernels_attn"],
    )
    axes, options = _layout(row, degrees, dims)
    mesh = make_mesh(tuple(axes.values()), axes=tuple(axes), topology=topology_of(row))
    reduce_dtype = "bfloat16" if _reduces_in_bfloat16(row) else "float32"
    return Request(dims, batch, reduce_dtype, mesh, options, degrees.assumed)


def _check(row: Row) -> None:
    """Raise InexpressibleError if something other than layout or dimensions is not modelled."""
    category, precision = row["category"], row["precision"]
    if row.seconds is None:
        raise InexpressibleError("the source states no batch, so that a step has no time")
    if "Mamba" in category:
        raise InexpressibleError("state-space layers with a public scan kernel are not modelled")
    if "CPU" in row["dp_variant"] or "CPU offload" in row["act_ckpt"]:
        raise InexpressibleError("offloading to the host is not modelled")
    if "FP4" in precision.upper():
        raise InexpressibleError("matrix products in FP4 are no option of planning")
    if topology_of(row) is None:
        raise InexpressibleError(f"there is no topology preset for {row['gpu_type']}")


def _reduces_in_bfloat16(row: Row) -> bool:
    precision = row["precision"]
    return "PURE" in precision or "bf16 params/grads" in precision


def _degrees(row: Row) -> Degrees:
    """The degrees of parallelism of a row.

    Raises:
        InexpressibleError: a degree is not stated, or they do not fit together.
    """
    assumed: list[str] = []
    sizes = {}
    for column in ("tp", "cp", "pp"):
        size = row.number(column)
        if size is None:
            raise InexpressibleError(f"{column} is not stated: {row[column]!r}")
        sizes[column] = size
    gpus = row.number("gpus") or 1
    others = sizes["tp"] * sizes["cp"] * sizes["pp"]
    if gpus % others:
        raise InexpressibleError(f"{gpus} GPUs do not divide by tp x cp x pp = {others}")
    data = gpus // others
    sequences = row.number("global_batch_seqs")
    if sequences is None:
        raise InexpressibleError("the global batch is not stated")
    size = row.number("micro_batch_seqs_per_device")
    if size is None:
        size = 1
        assumed.append("micro-batches of 1 sequence")
    if sequences % (size * data):
        raise InexpressibleError(
            f"{sequences} sequences do not divide into micro-batches of {size} on {data} ranks"
        )
    virtual, text = 1, row["vpp"]
    if sizes["pp"] > 1 and text:
        found = re.match(r"\d+", text)
        virtual = int(found[0]) if found else 1
        if not text.isdigit():
            assumed.append(f"{virtual} stages a pipeline rank")
    found = re.match(r"\d+", row["ep"])
    return Degrees(
        pipeline=sizes["pp"],
        virtual=virtual,
        data=data,
        expert=int(found[0]) if found else 1,
        context=sizes["cp"],
        tensor=sizes["tp"],
        micro_batch=size,
        micro_batches=sequences // (size * data),
        by_sequence=row["sp"] == "yes",
        experts_by_matrix="ETP" in row["ep"],
        assumed=tuple(assumed),
    )


def _layout(row: Row, degrees: Degrees, dims: Dimensions) -> tuple[Mapping[str, int], PlanOptions]:
    """Axes of the mesh, and options."""
    options: dict[str, Any] = {
        "memory_budget": _NO_LIMIT,
        "time_limit": _TIME_LIMIT,
        "relative_gap": _GAP,
        "overlap": True,
        "micro_batches": degrees.micro_batches,
        **_checkpointing(row, dims),
        "reshard_after_forward": "never",
        "master_weights": False,
        "accumulation_dtype": _accumulation_dtype(row, degrees),
        **_pipeline(degrees, dims),
        **_kernels(row),
        **_megatron(row, degrees, dims),
    }
    variant = row["dp_variant"]
    if "FSDP" in variant or "ZeRO-3" in variant or "ZeRO-2" in variant:
        return _fully_sharded(row, degrees, dims, options)
    options["distributed_optimizer"] = "no ZeRO" not in variant and "none" not in variant
    options["algo"] = "megatron-sp" if degrees.by_sequence else "megatron"
    return _megatron_axes(degrees), PlanOptions.model_validate(options)


def _accumulation_dtype(row: Row, degrees: Degrees) -> str | None:
    """Element type of sums of gradients: float32, or Megatron's that are reduced in bfloat16."""
    if degrees.micro_batches == 1 or (_is_megatron(row) and _reduces_in_bfloat16(row)):
        return None
    return "float32"


def _is_megatron(row: Row) -> bool:
    return any(name in row["framework"] for name in _MEGATRON)


def _megatron(row: Row, degrees: Degrees, dims: Dimensions) -> dict[str, Any]:
    """Options about how Megatron-LM and Transformer Engine run.

    Megatron-LM's buckets grow with the number of data-parallel ranks, so that a ring's latency
    stays small (megatron/core/distributed/distributed_data_parallel.py).
    """
    if not _is_megatron(row):
        return {}
    ranks = degrees.data * degrees.context
    has_engine = "Transformer Engine" in row["compile_kernels_attn"]
    return {
        "bucket_bytes": 4 * degrees.tensor * max(40_000_000, 1_000_000 * ranks),
        "fused_gradient_accumulation": True,
        "float8_weights_once": has_engine,
        "activation_overlap": _ACTIVATION_OVERLAP if has_engine else 0.0,
        "dispatch_share": _dispatch_share(row, degrees, dims),
        "expert_launch": 0.0 if _has_graphs(row) else _EXPERT_LAUNCH,
        "eager_modules": () if _has_graphs(row) or not dims.clamp else _NOT_FUSED,
    }


def _has_graphs(row: Row) -> bool:
    """True if CUDA graphs have the experts, so that no product waits for the host."""
    release = re.search(r"Megatron-Bridge (\d+\.\d+)", row["framework"])
    return release is not None and float(release[1]) >= _RELEASE_WITH_GRAPHS


def _dispatch_share(row: Row, degrees: Degrees, dims: Dimensions) -> float:
    """Share of routed rows that are sent: one to each node, or rank of a node, with experts.

    Experts are balanced, so that each choice of a token is any of them. Of what another
    micro-batch's compute hides, a part remains.
    """
    if degrees.expert == 1 or not dims.active or "all-to-all" in row["compile_kernels_attn"]:
        return 1.0
    node = row.number("gpus_per_node") or 1
    node = RACK_PART if "GB" in row["gpu_type"] else node
    nodes = degrees.expert * degrees.tensor // node
    places = nodes if nodes > 1 else degrees.expert
    exposed = 1 - _ACTIVATION_OVERLAP * ("EP overlap" in row["compile_kernels_attn"])
    return exposed * places / dims.active * (1 - (1 - 1 / places) ** dims.active)


def _kernels(row: Row) -> dict[str, Any]:
    """Options about the kernels that a source ran."""
    framework, kernels = row["framework"], row["compile_kernels_attn"]
    precision = row["precision"].upper()
    attention = next((kernel for text, kernel in _ATTENTION.items() if text in kernels), "auto")
    if "llm-foundry" in framework:
        attention = _attention_of_llm_foundry(row)
    return {
        "execution": "compile" if _is_compiled(row) else "eager",
        "float8_modules": _LINEAR if "FP8" in precision or "FLOAT8" in precision else (),
        "attention_kernel": attention,
    }


def _is_compiled(row: Row) -> bool:
    """True if layers run as fused kernels: those of a compiler, of XLA or of Megatron-LM."""
    kernels = row["compile_kernels_attn"].lower()
    if "eager" in kernels or re.search(r"\bno (torch\.)?compile", kernels):
        return False
    is_fused = any(word in kernels for word in ("compile", "fused", "transformer engine", "xla"))
    return is_fused or _is_megatron(row)


def _attention_of_llm_foundry(row: Row) -> str:
    """The kernel by the scripts of the source's tables.

    Those of May and October 2023 run FlashAttention in Triton (sweep.sh); that of January 2024, on
    128 H100 and more, FlashAttention-2 but for the models 13b and 30b (sweep.py).
    """
    late = row["gpu_type"].startswith("H100") and (row.number("gpus") or 0) >= _LATE_TABLE_GPUS
    in_triton = not late or row["model"] in {"MPT-13b", "MPT-30b"}
    return "flash_attention_1" if in_triton else "flash_attention_2"


def _pipeline(degrees: Degrees, dims: Dimensions) -> dict[str, Any]:
    stages = degrees.pipeline * degrees.virtual
    if stages == 1:
        return {}
    balance = layers_of_stages(dims.layers, stages)
    found: dict[str, Any] = {
        "stages": stages,
        "stages_per_rank": degrees.virtual,
        "schedule": "1F1B" if degrees.virtual == 1 else "Interleaved1F1B",
    }
    if all(balance):
        return {**found, "balance": balance}
    # The embedding or the head has a stage of its own.
    cuts = [f"before:layers.{number}" for number in range(dims.layers)]
    head = [f"after:layers.{dims.layers - 1}"] if not balance[-1] else []
    return {**found, "cuts": (*cuts[balance[0] :], *head)}


def layers_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Numbers of layers of stages, as equal as possible; the first and last have fewer.

    Raises:
        InexpressibleError: more stages than the first and the last would have no layer.
    """
    each, more = divmod(layers, stages)
    if layers < stages - 2:
        raise InexpressibleError(f"{layers} layers cannot be divided into {stages} stages")
    start = (stages - more + 1) // 2
    return tuple(each + (start <= number < start + more) for number in range(stages))


def _megatron_axes(degrees: Degrees) -> Mapping[str, int]:
    """The axes of a mesh with the ranks of Megatron-LM: tp, cp, ep, dp, pp from the innermost."""
    expert = degrees.expert
    if not degrees.experts_by_matrix and expert % degrees.tensor == 0:
        expert //= degrees.tensor
    if degrees.data % expert:
        raise InexpressibleError(f"groups of {expert} do not divide {degrees.data} ranks")
    sizes = {
        "pp": degrees.pipeline,
        "dp": degrees.data // expert,
        "ep": expert,
        "cp": degrees.context,
        "tp": degrees.tensor,
    }
    return {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}


def _fully_sharded(
    row: Row, degrees: Degrees, dims: Dimensions, options: dict[str, Any]
) -> tuple[Mapping[str, int], PlanOptions]:
    variant = row["dp_variant"]
    keeps = "SHARD_GRAD_OP" in variant or "ZeRO-2" in variant
    options["reshard_after_forward"] = "never" if keeps else "always"
    if not _is_megatron(row):
        options["bucket_bytes"] = _BFLOAT16_BYTES * _layer_parameters(dims)
    if degrees.pipeline * degrees.tensor * degrees.context * degrees.expert > 1:
        options["algo"] = "megatron-sp" if degrees.by_sequence else "megatron"
        options["distributed_optimizer"] = True
        return _megatron_axes(degrees), PlanOptions.model_validate(options)
    group = re.search(r"(?:group|FSDP) (\d+)", variant)
    inner = int(group[1]) if group else degrees.data
    if "(256 @256 GPUs)" in variant and degrees.data == 256:  # noqa: PLR2004  as the source says
        inner = 256
    if inner < degrees.data:
        options["algo"] = "hsdp"
        axes = {"replicate": degrees.data // inner, "shard": inner}
        return axes, PlanOptions.model_validate(options)
    options["algo"] = "fsdp2"
    return {"shard": degrees.data}, PlanOptions.model_validate(options)


def _layer_parameters(dims: Dimensions) -> int:
    """Matrix elements of a layer, which FSDP gathers at once."""
    attention = (2 * dims.heads + 2 * dims.kv_heads) * dims.width
    return dims.hidden * (attention + (2 + dims.gated) * dims.ffn)


def _checkpointing(row: Row, dims: Dimensions) -> dict[str, Any]:
    """Options about what is recomputed.

    Blocks may all be recomputed, or a stated share of them. What is selective is inside a fused
    attention, but for torchtitan's checkpoints of operators, which recompute every second product:
    about as many as the MLP has.
    """
    text = row["act_ckpt"].lower()
    share = re.search(r"\b(\d+)/(\d+)\b", text)
    modules: tuple[str, ...] = ()
    if share:
        part, whole = int(share[1]), int(share[2])
        layers = range(dims.layers)
        modules = tuple(
            f"layers.{i}" for i in layers if (i + 1) * part // whole > i * part // whole
        )
    elif text.startswith("selective") and re.search(r"\bop\b", text):
        modules = ("layers.*.mlp",)
    elif not text.startswith("full"):
        return {"activation_checkpointing": "never"}
    return {"activation_checkpointing": "always", "checkpointed_modules": modules}


def _decoding(row: Row, dims: Dimensions) -> Request:
    """One decoded token of one sequence, whose key-value cache is short."""
    ranks = row.number("tp") or 1
    options = PlanOptions(
        mode="inference",
        algo="megatron" if ranks > 1 else "optimal",
        execution="compile",
        memory_budget=_NO_LIMIT,
        time_limit=_TIME_LIMIT,
    )
    mesh = make_mesh((ranks,), axes=("tp",), topology=topology_of(row))
    batch = Batch(1, 1, training=False)
    return Request(dims, batch, "bfloat16", mesh, options)
