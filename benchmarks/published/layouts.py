"""Published layouts as meshes and options of planning."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.mesh import Mesh, make_mesh
from autoshard.plan.options import PlanOptions
from benchmarks.published import cells
from benchmarks.published.hardware import node_size, topology_of
from benchmarks.published.models import Batch, Dimensions
from benchmarks.published.public_models import dimensions_of
from benchmarks.published.rows import Row

_NO_LIMIT = "1000TB"
"""A memory budget that no plan reaches: published runs did fit."""
_TIME_LIMIT = 1200.0
_GAP = 0.02
"""Relative gap of plans: of a pinned layout little is left to decide."""

_ACTIVATION_OVERLAP = 0.5
"""Share of the collectives of activations that Transformer Engine's userbuffers and ring attention
hide."""
_EXPERT_LAUNCH = 30e-6
"""Seconds in which the host launches a product of an expert in Transformer Engine's grouped linear
layers, with what it does around the product."""
_RELEASE_WITH_GRAPHS = 26.06
"""Release of Megatron-Bridge from which the recipes of models of experts have full CUDA graphs."""
_NOT_FUSED = ("layers.*.mlp.experts.out.clamp", "layers.*.mlp.experts.down_bias")
"""Modules of experts that Megatron-LM leaves to PyTorch's kernels: the clamp of the activation, and
the bias of what experts return (weighted_bias_quick_geglu_impl in
megatron/core/fusions/fused_bias_geglu.py, TEGroupedMLP._apply_bias in
megatron/core/transformer/moe/experts.py; 0.15 to 0.18). Transformer Engine's fused operators have
both; recipes with full CUDA graphs use them (use_transformer_engine_op_fuser)."""
_LINEAR = ("layers.*",)
"""Modules whose matrix products are in FP8; embedding and head are not among them."""
_BLANK = ("", "-", "none", "no", "n/a", "na")
"""Texts of a degree of parallelism that is not used."""
_BFLOAT16_BYTES = 2


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
        raise InexpressibleError(
            "not all dimensions of the model are stated, nor is its config among the known ones"
        )
    if row["category"] == "inference decode TP":
        return _decoding(row, dims)
    degrees = _degrees(row)
    tokens = row.number("seq_len_tokens")
    if tokens is None:
        raise InexpressibleError("the length of a sequence is not stated")
    batch = Batch(
        degrees.micro_batch * degrees.data,
        tokens,
        fused_attention=cells.has_fused_attention(row),
    )
    axes, options = _layout(row, degrees, dims)
    topology = topology_of(row)
    assert topology is not None  # else the row would be refused
    rates = topology.device.kernels
    if rates is None or options.runtime.attention_kernel not in rates.attention:
        options = options.with_values(attention_kernel="auto")
    mesh = make_mesh(tuple(axes.values()), axes=tuple(axes), topology=topology)
    reduce_dtype = "bfloat16" if cells.reduces_in_bfloat16(row) else "float32"
    return Request(dims, batch, reduce_dtype, mesh, options, degrees.assumed)


def _check(row: Row) -> None:
    """Raise InexpressibleError if something other than layout or dimensions is not modelled."""
    category, precision = row["category"], row["precision"]
    if row.seconds is None:
        raise InexpressibleError("the source states no batch, so that a step has no time")
    if "Mamba" in category:
        raise InexpressibleError("state-space layers with a public scan kernel are not modelled")
    if cells.offloads(row):
        raise InexpressibleError("offloading to the host is not modelled")
    if "FP4" in precision.upper():
        raise InexpressibleError("matrix products in FP4 are no option of planning")
    if topology_of(row) is None:
        raise InexpressibleError(f"there is no topology preset for {row['gpu_type']}")


def _degrees(row: Row) -> Degrees:
    """The degrees of parallelism of a row.

    Raises:
        InexpressibleError: a degree is not stated, or they do not fit together.
    """
    assumed: list[str] = []
    sizes = {}
    for column in ("tp", "cp", "pp"):
        size = row.number(column)
        if size is None and row[column].lower() in _BLANK:
            size = 1
            assumed.append(f"no {column}")
        if not size:
            raise InexpressibleError(f"{column} is not stated: {row[column]!r}")
        sizes[column] = size
    gpus = row.number("gpus") or 1
    others = sizes["tp"] * sizes["cp"] * sizes["pp"]
    if gpus % others:
        raise InexpressibleError(f"{gpus} GPUs do not divide by tp x cp x pp = {others}")
    data = gpus // others
    sequences, size = _batch(row, data, sizes["pp"], assumed)
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
    if not found and row["ep"].lower() not in _BLANK:
        raise InexpressibleError(f"ep is not stated: {row['ep']!r}")
    return Degrees(
        pipeline=sizes["pp"],
        virtual=virtual,
        data=data,
        expert=int(found[0]) if found else 1,
        context=sizes["cp"],
        tensor=sizes["tp"],
        micro_batch=size,
        micro_batches=sequences // (size * data),
        by_sequence=cells.is_sequence_parallel(row),
        experts_by_matrix=cells.shares_matrices(row),
        assumed=tuple(assumed),
    )


def _batch(row: Row, data: int, pipeline: int, assumed: list[str]) -> tuple[int, int]:
    """Sequences of a step, and of a micro-batch of a data-parallel rank."""
    sequences, size = row.number("global_batch_seqs"), row.number("micro_batch_seqs_per_device")
    steps = row.number("grad_accum_steps")
    if not sequences and size and steps:
        sequences = size * steps * data
    if not sequences:
        raise InexpressibleError("the global batch is not stated")
    if not size and steps and sequences % (steps * data) == 0:
        size = sequences // (steps * data)
    is_whole = pipeline > 1 and size and sequences == size * data
    if not size or (is_whole and "torchtitan" in row["framework"].lower()):
        # As torchtitan's pipeline_parallel_microbatch_size divides the batch of a rank.
        size = 1
        assumed.append("micro-batches of 1 sequence")
    return sequences, size


def _layout(row: Row, degrees: Degrees, dims: Dimensions) -> tuple[Mapping[str, int], PlanOptions]:
    """Axes of the mesh, and options."""
    options: dict[str, Any] = {
        "runtime": "megatron-core" if cells.is_megatron(row) else "other",
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
        "dispatch_share": _dispatch_share(row, degrees, dims),
        **_megatron(row, degrees, dims),
    }
    if cells.is_fully_sharded(row):
        return _fully_sharded(row, degrees, dims, options)
    options["distributed_optimizer"] = cells.shards_optimizer(row)
    options["algo"] = "megatron-sp" if degrees.by_sequence else "megatron"
    return _megatron_axes(degrees), PlanOptions(**options)


def _accumulation_dtype(row: Row, degrees: Degrees) -> str | None:
    """Element type of sums of gradients: float32, or Megatron's that are reduced in bfloat16."""
    if degrees.micro_batches == 1 or (cells.is_megatron(row) and cells.reduces_in_bfloat16(row)):
        return None
    return "float32"


def _megatron(row: Row, degrees: Degrees, dims: Dimensions) -> dict[str, Any]:
    """Options about how Megatron-LM and Transformer Engine run.

    Megatron-LM's buckets grow with the number of data-parallel ranks, so that a ring's latency
    stays small (megatron/core/distributed/distributed_data_parallel.py).
    """
    if not cells.is_megatron(row):
        return {}
    ranks = degrees.data * degrees.context
    has_engine = "Transformer Engine" in row["compile_kernels_attn"]
    return {
        "regather_activations": True,
        "bucket_bytes": 4 * degrees.tensor * max(40_000_000, 1_000_000 * ranks),
        "fused_gradient_accumulation": True,
        "float8_weights_once": has_engine,
        "float8_saved_inputs": True,
        "weighted_activations": True,
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
    if degrees.expert == 1 or not dims.active:
        return 1.0
    exposed = 1 - _ACTIVATION_OVERLAP * cells.overlaps_dispatch(row)
    if not cells.sends_tokens_once(row):
        return exposed
    ranks = degrees.expert * (degrees.tensor if degrees.experts_by_matrix else 1)
    nodes = ranks // node_size(row)
    places = nodes if nodes > 1 else degrees.expert
    return exposed * places / dims.active * (1 - (1 - 1 / places) ** dims.active)


def _kernels(row: Row) -> dict[str, Any]:
    """Options about the kernels that a source ran."""
    return {
        "execution": "compile" if cells.is_compiled(row) else "eager",
        "float8_modules": _LINEAR if cells.is_in_float8(row) else (),
        "attention_kernel": cells.attention_kernel(row),
        "activation_overlap": _ACTIVATION_OVERLAP if cells.overlaps_activations(row) else 0.0,
        "balanced_attention": True,
    }


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
    options["reshard_after_forward"] = "never" if cells.keeps_gathered(row) else "always"
    if not cells.is_megatron(row):
        options["bucket_bytes"] = _BFLOAT16_BYTES * _layer_parameters(dims)
    if degrees.pipeline * degrees.tensor * degrees.context * degrees.expert > 1:
        options["algo"] = "megatron-sp" if degrees.by_sequence else "megatron"
        options["distributed_optimizer"] = True
        return _megatron_axes(degrees), PlanOptions(**options)
    inner = cells.shard_group(row, degrees.data)
    if degrees.data % inner:
        raise InexpressibleError(f"groups of {inner} do not divide {degrees.data} ranks")
    if inner < degrees.data:
        options["algo"] = "hsdp"
        axes = {"replicate": degrees.data // inner, "shard": inner}
        return axes, PlanOptions(**options)
    options["algo"] = "fsdp2"
    return {"shard": degrees.data}, PlanOptions(**options)


def _layer_parameters(dims: Dimensions) -> int:
    """Matrix elements of a layer, which FSDP gathers at once."""
    attention = (2 * dims.heads + 2 * dims.kv_heads) * dims.width
    return dims.hidden * (attention + (2 + dims.gated) * dims.ffn)


def _checkpointing(row: Row, dims: Dimensions) -> dict[str, Any]:
    """Options about what is recomputed."""
    modules = cells.recomputed(row, dims.layers)
    if modules is None:
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
