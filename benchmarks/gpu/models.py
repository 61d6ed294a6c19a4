"""The models that are measured, at their published sizes and small for a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.plain_models import Gpt2, Llama, PlainModel, Sizes, Vit


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the measurement.

    Attributes:
        title: its name in tables.
        real: as it runs on a GPU.
        small: as it runs on a CPU.
    """

    title: str
    real: PlainModel
    small: PlainModel

    def on(self, device: str) -> PlainModel:
        """The model for a type of device."""
        return self.small if device == "cpu" else self.real


_SMALL = Sizes(2, 32, 4, 64, 128, 16)

CASES: Mapping[str, Case] = {
    "gpt2": Case(
        "GPT-2 124M, 8 x 1024 tokens",
        PlainModel(Gpt2, Sizes(12, 768, 12, 3072, 50_257, 1024, dropout=0.1), 8),
        PlainModel(Gpt2, replace(_SMALL, dropout=0.1), 4),
    ),
    "llama": Case(
        "Llama 3.2 1B, 2 x 4096 tokens",
        PlainModel(Llama, Sizes(16, 2048, 32, 8192, 128_256, 4096, kv_heads=8), 2),
        PlainModel(Llama, replace(_SMALL, kv_heads=2), 4),
    ),
    "moe": Case(
        "mixture of 8 experts, 8 layers of 1024, 4 x 2048 tokens",
        PlainModel(Llama, Sizes(8, 1024, 16, 3584, 32_000, 2048, kv_heads=4, experts=8), 4),
        PlainModel(Llama, replace(_SMALL, kv_heads=2, experts=4), 4),
    ),
    "vit": Case(
        "ViT-B/16, 64 images",
        PlainModel(Vit, Sizes(12, 768, 12, 3072, 1000, 224), 64),
        PlainModel(Vit, replace(_SMALL, length=32, patch=8), 4),
    ),
}
"""Models of one rank; as in training, GPT-2 has dropout."""

SHARED: Mapping[str, Case] = {
    "gpt2": Case(
        "GPT-2 124M, 8 x 512 tokens",
        PlainModel(Gpt2, Sizes(12, 768, 12, 3072, 50_257, 512), 8),
        PlainModel(Gpt2, _SMALL, 4),
    ),
    "llama": Case(
        "Llama 3.2 1B, 4 of 16 layers, 4 x 2048 tokens",
        PlainModel(Llama, Sizes(4, 2048, 32, 8192, 128_256, 2048, kv_heads=8), 4),
        PlainModel(Llama, replace(_SMALL, kv_heads=4), 4),
    ),
}
"""Models of four ranks that share a GPU, which holds each of them four times."""
