"""The models that are measured, at their published sizes and small for a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.plain_models import Gpt2, Llama, PlainModel, Sizes, Vit


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the measurement.

    Attributes:
        real: as it runs on a GPU.
        small: as it runs on a CPU.
    """

    real: PlainModel
    small: PlainModel

    def on(self, device: str) -> PlainModel:
        """The model for a type of device."""
        return self.small if device == "cpu" else self.real


_SMALL = Sizes(1, 32, 4, 64, 128, 16)

CASES: Mapping[str, Case] = {
    "gpt2": Case(
        PlainModel(Gpt2, Sizes(12, 768, 12, 3072, 50_257, 1024, dropout=0.1), 8),
        PlainModel(Gpt2, replace(_SMALL, dropout=0.1), 4),
    ),
    "llama": Case(
        PlainModel(Llama, Sizes(16, 2048, 32, 8192, 128_256, 4096, kv_heads=8), 2),
        PlainModel(Llama, replace(_SMALL, kv_heads=2), 4),
    ),
    "moe": Case(
        PlainModel(Llama, Sizes(8, 1024, 16, 3584, 32_000, 2048, kv_heads=4, experts=8), 4),
        PlainModel(Llama, replace(_SMALL, kv_heads=2, experts=4), 4),
    ),
    "vit": Case(
        PlainModel(Vit, Sizes(12, 768, 12, 3072, 1000, 224), 64),
        PlainModel(Vit, replace(_SMALL, length=32, patch=8), 4),
    ),
}
"""Models of one rank; as in training, GPT-2 has dropout."""

SHARED: Mapping[str, Case] = {
    "gpt2": Case(
        PlainModel(Gpt2, Sizes(12, 768, 12, 3072, 50_257, 512), 8),
        PlainModel(Gpt2, _SMALL, 4),
    ),
    "llama": Case(
        PlainModel(Llama, Sizes(4, 2048, 32, 8192, 128_256, 1024, kv_heads=8), 4),
        PlainModel(Llama, replace(_SMALL, kv_heads=4), 4),
    ),
}
"""Models of four ranks that share a GPU, which holds each of them four times."""
