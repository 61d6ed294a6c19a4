"""Configs of small models of transformers, as files."""

import json
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


def write_config(folder: Path, **fields: object) -> str:
    """Write the config of a small Llama with other fields; returns its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | fields))
    return str(path)
