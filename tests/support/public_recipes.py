"""Public recipes: the settings that decide layout and memory, typed in, with their sources.

Models are tiny, with the recipe's numbers of layers, heads and experts, so that they fit wherever
the recipe does.
"""

from dataclasses import dataclass, field
from typing import Any

TITAN = "pytorch/torchtitan: torchtitan/models/"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/recipes/llama/"
MEGATRON = "NVIDIA/Megatron-LM: examples/"
TRL = "huggingface/trl: examples/accelerate_configs/"


@dataclass(frozen=True)
class PublicRecipe:
    """A recipe of a public repository.

    Attributes:
        source: repository and file, or pull request.
        name: of the file to write the text to.
        text: its settings.
        ranks: number of GPUs.
        axes: of the mesh that it means.
        model: numbers of layers and heads, and the batch of the program.
        function: of a Python file.
        named: a setting that is not modelled, which must be named.
    """

    source: str
    name: str
    text: str
    ranks: int
    axes: dict[str, int]
    model: dict[str, int] = field(default_factory=dict)
    function: str = ""
    named: str = ""


def titan(local: int, mode: str, tensor: int = 1, shard: int = -1, **more: Any) -> str:
    """The tables of torchtitan's TOML that matter."""
    lines = [f"{name} = {value!r}" for name, value in more.items()]
    return "\n".join(
        [
            *("[training]", f"local_batch_size = {local}", "seq_len = 64", "[parallelism]"),
            *(f"data_parallel_shard_degree = {shard}", f"tensor_parallel_degree = {tensor}"),
            *(*lines, "[activation_checkpoint]", f'mode = "{mode}"'),
        ]
    )


def megatron(sizes: str) -> str:
    """A script with a Bash array of arguments."""
    return f"MODEL_PARALLEL_ARGS=(\n    {sizes}\n)\ntorchrun pretrain_gpt.py\n"


def bridge(**settings: Any) -> str:
    """A recipe of Megatron-Bridge."""
    lines = [f"    cfg.{name.replace('__', '.')} = {value!r}" for name, value in settings.items()]
    return "\n".join(["def config():", "    cfg = _pretrain_common()", *lines, "    return cfg\n"])


def llama_bridge(tensor: int, pipeline: int, context: int, **more: Any) -> str:
    """The settings that all recipes of Llama on H100 have."""
    return bridge(
        model__tensor_model_parallel_size=tensor,
        model__pipeline_model_parallel_size=pipeline,
        model__context_parallel_size=context,
        model__sequence_parallel=tensor > 1,
        train__global_batch_size=512,
        train__micro_batch_size=1,
        ddp__use_distributed_optimizer=True,
        ddp__grad_reduce_in_fp32=True,
        **more,
    )


REGISTRY = """
def llama3_base():
    return Trainer.Config(training=TrainingConfig(local_batch_size=8, seq_len=64))

def llama3_70b() -> Trainer.Config:
    config = llama3_base()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=8)
    config.activation_checkpoint = ActivationCheckpointConfig(mode="full")
    return config
"""

FSDP2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: {checkpointing}
  fsdp_offload_params: {offload}
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_processes: {ranks}
"""
SIZES = """
parallelism_config:
  parallelism_config_dp_replicate_size: {replicate}
  parallelism_config_dp_shard_size: {shard}
  parallelism_config_tp_size: {tensor}
  parallelism_config_cp_size: {context}
"""
PURE = {"checkpointing": "false", "offload": "false", "ranks": 8}

DEEPSPEED_FILE = """
deepspeed_config:
  gradient_accumulation_steps: 1
  offload_optimizer_device: none
  offload_param_device: none
  zero_stage: {stage}
distributed_type: DEEPSPEED
mixed_precision: 'bf16'
num_processes: 8
"""

LLAMA_TP = (
    '{"tp_size": 4, "tp_plan": {'
    '"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.k_proj": "colwise", '
    '"model.layers.*.self_attn.v_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise", '
    '"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise", '
    '"model.layers.*.mlp.down_proj": "rowwise"}}'
)

RIGHT = (
    PublicRecipe(
        f"{TITAN}llama3/train_configs/llama3_8b.toml",
        *("llama3_8b.toml", titan(1, "selective"), 8, {"dp_shard": 8}),
        {"batch": 8},
    ),
    PublicRecipe(
        f"{TITAN}llama3/train_configs/llama3_70b.toml",
        *("llama3_70b.toml", titan(8, "full", 8), 64, {"dp_shard": 8, "tp": 8}),
        {"batch": 64, "kv_heads": 8},
    ),
    PublicRecipe(
        f"{TITAN}llama3/train_configs/llama3_405b.toml",
        *("llama3_405b.toml", titan(2, "full", 8), 128, {"dp_shard": 16, "tp": 8}),
        {"batch": 32, "kv_heads": 8},
    ),
    PublicRecipe(
        "pytorch/torchtitan: llama3_70b-8xb200-131k.toml",
        "llama3_70b.toml",
        titan(1, "full", 4, 2)
        + "\n[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n",
        *(8, {"dp_shard": 2, "tp": 4}, {"batch": 2}),
        named="quantize.linear.float8.enable_fsdp_float8_all_gather",
    ),
    PublicRecipe(
        f"{TITAN}llama3/config_registry.py, llama3_70b",
        *("config_registry.py", REGISTRY, 64, {"dp_shard": 8, "tp": 8}),
        *({"batch": 64, "kv_heads": 8}, "llama3_70b"),
    ),
    PublicRecipe(
        f"{BRIDGE}h100/llama3.py, llama32_1b_pretrain_1gpu_h100_bf16_config",
        *("llama3.py", llama_bridge(1, 1, 1), 8, {"dp": 8}, {"batch": 8}, "config"),
    ),
    PublicRecipe(
        f"{BRIDGE}h100/llama3.py, llama3_8b_pretrain_2gpu_h100_bf16_config",
        *("llama3.py", llama_bridge(1, 1, 2), 2, {"cp": 2}, {"batch": 1}, "config"),
    ),
    PublicRecipe(
        f"{BRIDGE}h100/llama3.py, llama3_8b_pretrain_16gpu_h100_bf16_16k_config",
        *("llama3.py", llama_bridge(4, 2, 2), 16, {"pp": 2, "cp": 2, "tp": 4}),
        *({"batch": 1}, "config"),
    ),
    PublicRecipe(
        f"{BRIDGE}llama31_405b.py",
        "llama31_405b.py",
        llama_bridge(
            *(8, 8, 4),
            model__virtual_pipeline_model_parallel_size=2,
            model__account_for_embedding_in_pipeline_split=True,
            model__account_for_loss_in_pipeline_split=True,
        ),
        *(256, {"pp": 8, "cp": 4, "tp": 8}, {"batch": 1, "kv_heads": 8, "layers": 126}, "config"),
    ),
    PublicRecipe(
        f"{MEGATRON}gpt3/train_gpt3_175b_distributed.sh",
        "train.sh",
        megatron(
            "--num-layers 96 --seq-length 64 --micro-batch-size 1 --global-batch-size 1536 --fp16 "
            "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
        ),
        *(128, {"pp": 16, "tp": 8}, {"batch": 1, "kv_heads": 8, "layers": 96}),
    ),
    PublicRecipe(
        f"{MEGATRON}llama/train_llama3_8b_h100_fp8.sh",
        "train.sh",
        "TP_SIZE=1\nCP_SIZE=1\nMICRO_BATCH_SIZE=1\nGLOBAL_BATCH_SIZE=128\n"
        + megatron(
            "--micro-batch-size $MICRO_BATCH_SIZE --global-batch-size $GLOBAL_BATCH_SIZE --bf16 "
            "--tensor-model-parallel-size $TP_SIZE --context-parallel-size $CP_SIZE "
            '--sequence-parallel --use-distributed-optimizer "--fp8-format hybrid"'
        ),
        *(8, {"dp": 8}, {"batch": 8}),
        named="--fp8-format",
    ),
    PublicRecipe(
        f"{TRL}fsdp2.yaml", "fsdp2.yaml", FSDP2.format(**PURE), 8, {"dp": 8}, {"batch": 8}
    ),
    PublicRecipe(
        "huggingface/accelerate: issues/3798, with dp_shard_size 2",
        "fsdp.yaml",
        FSDP2.format(**PURE | {"ranks": 2})
        + SIZES.format(replicate=1, shard=2, tensor=1, context=1),
        *(2, {"dp": 2}, {"batch": 8}),
    ),
    PublicRecipe(
        "huggingface/accelerate: issues/3867",
        "cp.yaml",
        FSDP2.format(**PURE | {"ranks": 2, "checkpointing": "true"})
        + SIZES.format(replicate=1, shard=1, tensor=1, context=2),
        *(2, {"cp": 2}, {"batch": 8}),
    ),
    PublicRecipe(
        "huggingface/accelerate: pull/3900, nd_parallel.py",
        "nd.yaml",
        FSDP2.format(**PURE | {"ranks": 4})
        + SIZES.format(replicate=1, shard=2, tensor=2, context=1),
        *(4, {"dp": 2, "tp": 2}, {"batch": 8}),
    ),
    PublicRecipe(
        "NVIDIA/Model-Optimizer: pull/1302, dp_shard_size 4 on 8 GPUs",
        "hsdp.yaml",
        FSDP2.format(**PURE) + SIZES.format(replicate=2, shard=4, tensor=1, context=1),
        *(8, {"replicate": 2, "shard": 4}, {"batch": 8}),
    ),
    PublicRecipe(
        f"{TRL}deepspeed_zero3.yaml",
        *("zero3.yaml", DEEPSPEED_FILE.format(stage=3), 8, {"dp": 8}, {"batch": 8}),
    ),
    PublicRecipe(
        f"{TRL}deepspeed_zero2.yaml",
        *("zero2.yaml", DEEPSPEED_FILE.format(stage=2), 8, {"dp": 8}, {"batch": 8}),
    ),
    PublicRecipe(
        "huggingface/transformers: tests/deepspeed/ds_config_zero2.json",
        "zero2.json",
        '{"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "offload_optimizer": '
        '{"device": "cpu"}}, "train_batch_size": "auto", "gradient_accumulation_steps": "auto", '
        '"train_micro_batch_size_per_gpu": "auto"}',
        *(8, {"dp": 8}, {"batch": 8}),
        named="zero_optimization.offload_optimizer to cpu",
    ),
    PublicRecipe(
        "huggingface/transformers: tests/deepspeed/ds_config_zero3.json",
        "zero3.json",
        '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_param": {"device": '
        '"cpu"}, "stage3_param_persistence_threshold": 0}}',
        *(8, {"dp": 8}, {"batch": 8}),
        named="zero_optimization.offload_param to cpu",
    ),
    PublicRecipe(
        "huggingface/transformers: src/transformers/models/llama/configuration_llama.py",
        *("tp_plan.json", LLAMA_TP, 4, {"tp": 4}, {"batch": 8}),
    ),
)
"""Recipes that run."""

WRONG = (
    (
        "pytorch/torchtitan: pull/4016, Qwen3.5-122B-A10B and 397B-A17B with TP 4 and 8",
        *("qwen.toml", titan(4, "selective", 4), 16, {"kv_heads": 2, "batch": 16}),
        (
            "TP 4 does not divide 2 heads of keys and values, and torchtitan does not repeat "
            "them: TP is at most 2"
        ),
    ),
    (
        "NVIDIA-NeMo/Megatron-Bridge: pull/6043, EP 64 on B200",
        "nemotron.yaml",
        (
            "model:\n  tensor_model_parallel_size: 1\n  expert_model_parallel_size: 64\n"
            "  moe_token_dispatcher_type: flex\n  moe_flex_dispatcher_backend: hybridep\n"
        ),
        *(64, {"experts": 64, "batch": 64}),
        (
            "EP 64 needs 64 ranks in one NVLink domain, as HybridEP exchanges rows there, but a "
            "domain has 8 devices: EP is at most 8"
        ),
    ),
    (
        "huggingface/accelerate: issues/3798, FSDP with TP over all ranks",
        "tp.yaml",
        FSDP2.format(**PURE | {"ranks": 2})
        + SIZES.format(replicate=1, shard=1, tensor=2, context=1),
        *(2, {"batch": 8}),
        "FSDP has no ranks to shard over: dp_shard_size and cp_size are 1, and tp_size 2",
    ),
    (
        "huggingface/accelerate: issues/3804, two replicas on one process",
        "replicas.yaml",
        FSDP2.format(**PURE | {"ranks": 1})
        + SIZES.format(replicate=2, shard=1, tensor=1, context=1),
        *(1, {"batch": 8}),
        "dp_replicate_size 2, make 2 ranks, but num_processes is 1",
    ),
    (
        "huggingface/transformers: issues/48307, TP 8 with 4 heads of keys",
        *("tp_plan.json", LLAMA_TP.replace('"tp_size": 4', '"tp_size": 8'), 8, {"batch": 8}),
        "TP 8 does not divide 4 heads of keys and values, and transformers does not repeat them",
    ),
)
"""Source, name and text of a file, ranks, model, and the reason why it does not run."""
