"""The models that are planned, at published sizes.

They are built on the meta device from the config classes of transformers, without downloads and
without weights. `python -m benchmarks.models NAME PATH` exports one, or a family of the zoo
(`zoo/NAME`); the benchmarks do so in another process and keep the file (see `archives`).
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

from autoshard.graph import export_model

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its batch, described but not built.

    Attributes:
        config: name of the config class in transformers.
        head: name of the model class in transformers.
        sizes: arguments of the config class.
        dtype: of parameters and activations.
        inputs: makes the keyword arguments of forward; called on the meta device.
    """

    config: str
    head: str
    sizes: Mapping[str, Any]
    dtype: torch.dtype
    inputs: Callable[[], Inputs]

    def export(self) -> bytes:
        """The archive of the model in training mode."""
        model, inputs = self.build("meta")
        return export_model(model, (), inputs)

    def build(self, device: str) -> tuple[nn.Module, Inputs]:
        """The model in training mode with random weights, and a batch, on a device."""
        config = getattr(transformers, self.config)(**self.sizes)
        with torch.device(device):
            model: nn.Module = getattr(transformers, self.head)(config).to(self.dtype)
            inputs = self.inputs()
        floats = {name: x.to(self.dtype) for name, x in inputs.items() if _is_float(x)}
        return model.train(), inputs | floats


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _tokens(batch: int, sequence: int) -> torch.Tensor:
    return torch.zeros(batch, sequence, dtype=torch.long)


def decoder_inputs(batch: int, sequence: int) -> Callable[[], Inputs]:
    """Tokens and labels of a decoder."""

    def inputs() -> Inputs:
        ids = _tokens(batch, sequence)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    return inputs


def masked_inputs(batch: int, sequence: int) -> Callable[[], Inputs]:
    """Tokens, labels and a mask without padding."""

    def inputs() -> Inputs:
        ids = _tokens(batch, sequence)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return inputs


def _translation_inputs(batch: int, source: int, target: int) -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        ids, labels = _tokens(batch, source), _tokens(batch, target)
        return {"input_ids": ids, "labels": labels, "use_cache": False}

    return inputs


def image_inputs(batch: int) -> Callable[[], Inputs]:
    """Images of 224 x 224 pixels and labels."""

    def inputs() -> Inputs:
        labels = torch.zeros(batch, dtype=torch.long)
        return {"pixel_values": torch.zeros(batch, 3, 224, 224), "labels": labels}

    return inputs


def _llama3(layers: int, batch: int, sequence: int, **sizes: int) -> Model:
    """Llama 3 (arXiv:2407.21783, table 3); with the sizes of 8B unless given."""
    llama = {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }
    inputs = decoder_inputs(batch, sequence)
    return Model("LlamaConfig", "LlamaForCausalLM", llama | sizes, torch.bfloat16, inputs)


def _gpt2(batch: int, sequence: int, **sizes: int) -> Model:
    inputs = decoder_inputs(batch, sequence)
    return Model("GPT2Config", "GPT2LMHeadModel", sizes, torch.float32, inputs)


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "gpt2": _gpt2(8, 1024),
        "gpt2-tiny": _gpt2(8, 64, n_layer=2, n_embd=64, n_head=4, vocab_size=256),
        "gpt2-xl": _gpt2(8, 1024, n_layer=48, n_embd=1600, n_head=25),
        "bert-base": Model(
            "BertConfig", "BertForMaskedLM", {}, torch.float32, masked_inputs(32, 512)
        ),
        "t5-base": Model(
            "T5Config",
            "T5ForConditionalGeneration",
            {
                "d_model": 768,
                "d_ff": 3072,
                "num_layers": 12,
                "num_heads": 12,
                "decoder_start_token_id": 0,
            },
            torch.float32,
            _translation_inputs(16, 512, 128),
        ),
        "vit-base": Model(
            "ViTConfig",
            "ViTForImageClassification",
            {"num_labels": 1000},
            torch.float32,
            image_inputs(64),
        ),
        "resnet-50": Model(
            "ResNetConfig",
            "ResNetForImageClassification",
            {"num_labels": 1000},
            torch.float32,
            image_inputs(256),
        ),
        "llama3-8b": _llama3(32, 16, 8192),
        "llama3-8b-8-layers": _llama3(8, 16, 8192),
        "llama3-8b-128-layers": _llama3(128, 16, 8192),
        "llama3-70b": _llama3(
            80, 8, 4096, hidden_size=8192, intermediate_size=28_672, num_attention_heads=64
        ),
        "qwen2-7b": Model(
            "Qwen2Config",
            "Qwen2ForCausalLM",
            {
                "vocab_size": 152_064,
                "hidden_size": 3584,
                "intermediate_size": 18_944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
            },
            torch.bfloat16,
            decoder_inputs(8, 4096),
        ),
        "mixtral-8x7b": Model(
            "MixtralConfig", "MixtralForCausalLM", {}, torch.bfloat16, decoder_inputs(8, 4096)
        ),
        "llama-3-405b-micro-batch": _llama3(
            126,
            128,
            8192,
            hidden_size=16384,
            intermediate_size=53248,
            num_attention_heads=128,
        ),
        "deepseek-v3-micro-batch": Model(
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            {"max_position_embeddings": 4096},
            torch.bfloat16,
            decoder_inputs(128, 4096),
        ),
        "deepseek-v3-6-layers": Model(
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            {"num_hidden_layers": 6, "max_position_embeddings": 4096},
            torch.bfloat16,
            decoder_inputs(8, 4096),
        ),
    }
)
"""Models by name; batch and sequence are those of a step over all devices."""


def main() -> int:
    """Export one model into a file."""
    parser = argparse.ArgumentParser(description="Export a model on the meta device.")
    parser.add_argument("name", help=f"zoo/NAME, or one of {', '.join(MODELS)}")
    parser.add_argument("path", type=Path, help="file for the archive")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    family = options.name.removeprefix("zoo/")
    if family == options.name:
        options.path.write_bytes(MODELS[options.name].export())
    else:
        from benchmarks.zoo.families import FAMILIES  # noqa: PLC0415  it reads this module

        model, inputs = FAMILIES[family].build_real()
        options.path.write_bytes(export_model(model, (), inputs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
