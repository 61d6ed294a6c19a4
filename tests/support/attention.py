"""Models whose attention is all that matters."""

from typing import Any

import torch
from support.models import Case
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM


class Layer(nn.Module):
    """A layer of a decoder without rotary embeddings; the mask follows from places."""

    def __init__(self, width: int, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.depth, bias=False)
        self.v = nn.Linear(width, groups * self.depth, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, self.depth)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Layers between an embedding and the loss of labels."""

    def __init__(self, vocabulary: int, layers: int, *sizes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, sizes[0])
        self.layers = nn.Sequential(*(Layer(*sizes) for _ in range(layers)))
        self.head = nn.Linear(sizes[0], vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.table(ids)))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Decoding(nn.Module):
    """One new token and a long cache of keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.depth = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, self.depth)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


def decoder(
    sequence: int, *, width: int, hidden: int, heads: int, groups: int, vocabulary: int
) -> Case:
    """Two layers on one sequence."""
    ids = torch.randint(0, vocabulary, (1, sequence))
    model = Decoder(vocabulary, 2, width, hidden, heads, groups)
    return model, {"ids": ids, "labels": ids}


def llama(
    sequence: int, *, width: int, hidden: int, heads: int, groups: int, vocabulary: int
) -> Case:
    """Two layers on one sequence; the mask is a tensor, as the library exports it."""
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=width,
        intermediate_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        max_position_embeddings=sequence,
    )
    ids = torch.randint(0, vocabulary, (1, sequence))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def decoding(cached: int, *, width: int, heads: int, groups: int) -> Case:
    """One sequence, whose next token attends to a cache."""
    cache = torch.randn(1, groups, cached, width // heads)
    inputs: dict[str, Any] = {"keys": cache, "values": torch.randn_like(cache)}
    return Decoding(width, heads), {"x": torch.randn(1, 1, width)} | inputs
