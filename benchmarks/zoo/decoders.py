"""Decoders of the zoo: dense models, mixtures of experts and state-space models.

Sizes are those of the published models; other arguments have the defaults of the config class,
which are those of the model after which the class is named.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.models import MODELS
from benchmarks.zoo.family import (
    Family,
    Maker,
    Sizes,
    decoder,
    scan_decoder,
)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
}
_GROUPED = SMALL | {"num_key_value_heads": 4, "pad_token_id": 0}
_GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}


def _decoder(
    name: str,
    real: Sizes,
    small: Sizes,
    *,
    kind: str = "decoder",
    batch: tuple[int, int] = (8, 4096),
    dtype: torch.dtype = torch.bfloat16,
    inputs: Maker = decoder,
    config: str = "Config",
    training: bool = True,
    adapt: Callable[[nn.Module], None] | None = None,
    note: str = "",
) -> Family:
    """A family of which transformers has the classes NAMEConfig and NAMEForCausalLM."""
    return Family(
        kind=kind,
        inputs=inputs,
        real=real,
        real_batch={"batch": batch[0], "sequence": batch[1]},
        small=small,
        small_batch={"batch": 8, "sequence": 16},
        config=f"{name}{config}",
        head=f"{name}ForCausalLM",
        dtype=dtype,
        training=training,
        adapt=adapt,
        note=note,
    )


def _plain_gelu(model: nn.Module) -> None:
    """Bloom's GELU without its custom autograd function; the gradient is the same."""
    for module in model.modules():
        if hasattr(module, "gelu_impl"):
            module.gelu_impl = nn.GELU("tanh")


def sizes(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Sizes under the names that most config classes have for them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


DECODERS: Mapping[str, Family] = {
    "gpt2": Family(
        kind="decoder",
        inputs=decoder,
        real=MODELS["gpt2-xl"].sizes,
        real_batch={"batch": 8, "sequence": 1024},
        small=_GPT,
        small_batch={"batch": 8, "sequence": 16},
        config="GPT2Config",
        head="GPT2LMHeadModel",
        note="XL",
    ),
    "gpt-neo": _decoder(
        "GPTNeo",
        {},
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
            "window_size": 4,
        },
        batch=(8, 2048),
        note="1.3B",
    ),
    "gpt-j": _decoder("GPTJ", {}, _GPT | {"rotary_dim": 4}, batch=(8, 2048), note="6B"),
    "gpt-neox": _decoder(
        "GPTNeoX",
        sizes(4096, 16_384, 32, 32, vocab_size=50_432),
        SMALL,
        batch=(8, 2048),
        note="Pythia 6.9B",
    ),
    "opt": _decoder(
        "OPT",
        {
            "hidden_size": 4096,
            "word_embed_proj_dim": 4096,
            "ffn_dim": 16_384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
        },
        batch=(8, 2048),
        note="6.7B",
    ),
    "bloom": _decoder(
        "Bloom",
        {"hidden_size": 4096, "n_layer": 30, "n_head": 32},
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        batch=(8, 2048),
        adapt=_plain_gelu,
        note="7.1B",
    ),
    "falcon": _decoder(
        "Falcon",
        {},
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
        },
        batch=(8, 2048),
        note="7B",
    ),
    "mpt": _decoder(
        "Mpt",
        {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50_432},
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 32},
        batch=(8, 2048),
        note="7B",
    ),
    "llama": _decoder("Llama", MODELS["llama3-8b"].sizes, _GROUPED, note="3 8B"),
    "mistral": _decoder("Mistral", {}, _GROUPED | {"sliding_window": 8}, note="7B"),
    "qwen2": _decoder("Qwen2", MODELS["qwen2-7b"].sizes, _GROUPED, note="7B"),
    "qwen3": _decoder(
        "Qwen3",
        sizes(4096, 12_288, 36, 32, num_key_value_heads=8, head_dim=128, vocab_size=151_936),
        _GROUPED | {"head_dim": 8},
        note="8B",
    ),
    "gemma2": _decoder(
        "Gemma2",
        sizes(3584, 14_336, 42, 16, num_key_value_heads=8, head_dim=256),
        _GROUPED | {"head_dim": 8, "sliding_window": 8},
        note="9B",
    ),
    "gemma3": _decoder(
        "Gemma3",
        sizes(2560, 10_240, 34, 8, num_key_value_heads=4, head_dim=256),
        _GROUPED | {"head_dim": 8, "sliding_window": 8},
        config="TextConfig",
        note="4B, text",
    ),
    "phi": _decoder(
        "Phi",
        sizes(2560, 10_240, 32, 32, partial_rotary_factor=0.4),
        SMALL,
        batch=(8, 2048),
        note="2",
    ),
    "phi3": _decoder("Phi3", {}, _GROUPED, note="mini"),
    "stablelm": _decoder("StableLm", {}, _GROUPED | {"partial_rotary_factor": 0.5}, note="3B"),
    "starcoder2": _decoder(
        "Starcoder2",
        sizes(4608, 18_432, 32, 36, num_key_value_heads=4),
        _GROUPED,
        note="7B",
    ),
    "olmo2": _decoder("Olmo2", {"vocab_size": 100_352}, _GROUPED, note="7B"),
    "cohere": _decoder("Cohere", {}, _GROUPED, note="Command R 35B"),
    "granite": _decoder(
        "Granite",
        sizes(4096, 12_800, 40, 32, num_key_value_heads=8, vocab_size=49_155),
        _GROUPED,
        note="3.0 8B",
    ),
    "nemotron": _decoder("Nemotron", {"num_key_value_heads": 8}, _GROUPED, note="4 15B"),
}
_EXPERTS = _GROUPED | {"num_experts_per_tok": 2}

EXPERTS: Mapping[str, Family] = {
    "mixtral": _decoder(
        "Mixtral", {}, _EXPERTS | {"num_local_experts": 8}, kind="experts", note="8x7B"
    ),
    "qwen2-moe": _decoder(
        "Qwen2Moe",
        {},
        _EXPERTS
        | {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32},
        kind="experts",
        note="1.5 A2.7B",
    ),
    "qwen3-moe": _decoder(
        "Qwen3Moe",
        sizes(
            2048,
            6144,
            48,
            32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        _EXPERTS | {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
        kind="experts",
        note="30B A3B",
    ),
    "deepseek-v3": _decoder(
        "DeepseekV3",
        MODELS["deepseek-v3-6-layers"].sizes,
        {
            **_GROUPED,
            "num_key_value_heads": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
        kind="experts",
        note="the first 6 layers",
    ),
    "olmoe": _decoder("Olmoe", {}, _EXPERTS | {"num_experts": 8}, kind="experts", note="1B-7B"),
    "gpt-oss": _decoder(
        "GptOss",
        {"num_hidden_layers": 24, "num_local_experts": 32},
        _EXPERTS | {"num_local_experts": 8, "head_dim": 8, "sliding_window": 8},
        kind="experts",
        note="20B",
    ),
    "granite-moe": _decoder(
        "GraniteMoe",
        sizes(
            1536,
            512,
            32,
            24,
            num_key_value_heads=8,
            vocab_size=49_155,
            num_local_experts=40,
            num_experts_per_tok=8,
        ),
        _EXPERTS | {"num_local_experts": 8},
        kind="experts",
        note="3.0 3B A800M",
    ),
    "phimoe": _decoder(
        "Phimoe",
        {},
        _EXPERTS | {"num_local_experts": 8},
        kind="experts",
        training=False,
        note="3.5, 42B",
    ),
}

STATES: Mapping[str, Family] = {
    "mamba": _decoder(
        "Mamba",
        {},
        {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
        kind="state space",
        inputs=scan_decoder,
        batch=(8, 64),
        note="130M; 64 tokens, since the scan is unrolled",
    ),
    "mamba2": _decoder(
        "Mamba2",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "num_heads": 80,
            "head_dim": 64,
            "n_groups": 1,
            "vocab_size": 50_288,
        },
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
        kind="state space",
        inputs=scan_decoder,
        batch=(8, 2048),
        note="2.7B",
    ),
    "rwkv": _decoder(
        "Rwkv",
        {},
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 32},
        kind="state space",
        inputs=scan_decoder,
        batch=(8, 64),
        note="4; 64 tokens, since the scan is unrolled",
    ),
    "recurrent-gemma": _decoder(
        "RecurrentGemma",
        {},
        _GROUPED | {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
        kind="state space",
        batch=(8, 64),
        note="2B; 64 tokens, since the scan is unrolled",
    ),
    "jamba": _decoder(
        "Jamba",
        {"num_hidden_layers": 8, "use_mamba_kernels": False},
        {
            **_EXPERTS,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        kind="state space",
        batch=(8, 64),
        note="v0.1, 8 layers; 64 tokens, since the scan is unrolled",
    ),
}
