"""Dimensions of public models, for rows that do not state them all.

Sources are the config files of the models on Hugging Face, by the names in the column
`hf_config`, and for those without one the cited papers.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.published.models import Dimensions
from benchmarks.published.rows import Row

_DEEPSEEK_LATENT = (1536, 512, 128, 64, 128)
"""DeepSeek-V3 (arXiv:2412.19437, section 4.2); Kimi K2 has the same."""

_MOE: Mapping[str, Dimensions] = {
    "deepseek-ai/DeepSeek-V3": Dimensions(
        7168, 61, 128, 128, 2048, 129_280, experts=256, active=8, shared=2048, dense_layers=3,
        dense_ffn=18_432, latent=_DEEPSEEK_LATENT,
    ),
    "moonshotai/Kimi-K2": Dimensions(
        7168, 61, 64, 64, 2048, 163_840, experts=384, active=8, shared=2048, dense_layers=1,
        dense_ffn=18_432, latent=_DEEPSEEK_LATENT,
    ),
    "Qwen/Qwen3-235B-A22B": Dimensions(
        4096, 94, 64, 4, 1536, 151_936, head_size=128, experts=128, active=8
    ),
    "Qwen/Qwen3-30B-A3B": Dimensions(
        2048, 48, 32, 4, 768, 151_936, head_size=128, experts=128, active=8
    ),
    "openai/gpt-oss-20b": Dimensions(
        2880, 24, 64, 8, 2880, 201_088, head_size=64, experts=32, active=4, biases=True, clamp=7.0,
        expert_biases=True,
    ),
    "mistralai/Mixtral-8x7B": Dimensions(
        4096, 32, 32, 8, 14_336, 32_000, experts=8, active=2
    ),
    "mistralai/Mixtral-8x22B": Dimensions(
        6144, 56, 48, 8, 16_384, 32_768, experts=8, active=2
    ),
    "openai/gpt-oss-120b": Dimensions(
        2880, 36, 64, 8, 2880, 201_088, head_size=64, experts=128, active=4, biases=True,
        clamp=7.0, expert_biases=True,
    ),
    "xai-org/grok-1": Dimensions(
        6144, 64, 48, 8, 32_768, 131_072, head_size=128, experts=8, active=2, activation="gelu"
    ),
}  # fmt: skip


_GPT = re.compile(r"gpt|mpt|bloom|\bopt\b|turing", re.IGNORECASE)
"""Names of models with layer norms, biases, a GELU without a gate and learned positions."""


def dimensions_of(row: Row) -> Dimensions | None:
    """The dimensions of the model of a row; None if they are not known."""
    found = _of_experts(row)
    if found is not None:
        return replace(found, layers=row.number("layers") or found.layers)
    columns = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
    hidden, layers, heads, kv_heads, ffn, vocab = (row.number(c) for c in columns)
    if has_experts(row) or not (hidden and layers and heads and ffn and vocab):
        return None
    found = Dimensions(hidden, layers, heads, kv_heads or heads, ffn, vocab)
    if "Nemotron-4" in row["model"]:
        return replace(found, gated=False, norm="layer", activation="squared_relu", head_size=0)
    if not _GPT.search(row["model"]):
        return found
    return replace(
        found,
        gated=False,
        norm="layer",
        activation="gelu",
        rotary=False,
        biases=True,
        tied=True,
        float32_loss=not row["model"].startswith("MPT"),
    )


def has_experts(row: Row) -> bool:
    """True if the model of a row is a mixture of experts."""
    text = f"{row['category']} {row['model']} {row['hf_config']}"
    is_sharded = (row.number("ep") or 1) > 1
    return is_sharded or re.search(r"\bMoE\b|\bexperts?\b|-A\d+B\b", text) is not None


def _of_experts(row: Row) -> Dimensions | None:
    """The dimensions of a known mixture of experts, by the name of its config or of the model."""
    names = [_plain(row["hf_config"].split(" (")[0].split("/")[-1]), _plain(row["model"])]
    for config, dims in _MOE.items():
        known = _plain(config.split("/")[-1])
        if any(re.fullmatch(f"{known}(base|instruct|chat|it)?", name) for name in names):
            return dims
    return None


def _plain(name: str) -> str:
    """A name without what spellings differ in: case, signs, and sizes after that of the model."""
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*", "", name.lower()))
    return re.sub(r"(?<=v3)671b$|(?<=k2)(1t|base)?$|(?<=grok1)314b$", "", plain)
