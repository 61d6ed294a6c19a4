"""GPT-2, Llama, a mixture of experts and ViT in plain torch; each returns its loss.

The benchmarks that run models on devices build them without transformers, which need not be
installed there. Their parts are those of the published models, with the same shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Inputs = dict[str, torch.Tensor]
"""Keyword arguments of forward."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        layers: number of blocks.
        width: of the residual stream.
        heads: of queries.
        hidden: width of the perceptrons.
        vocabulary: number of tokens, or of classes of images.
        length: of a sequence, or pixels along a side of an image.
        kv_heads: of keys and values, if they are fewer than those of queries.
        experts: number of perceptrons per block, of which each token uses two; 0 for one.
        patch: pixels along a side of a patch.
        dropout: probability, of embeddings, attention and residuals.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    kv_heads: int = 0
    experts: int = 0
    patch: int = 16
    dropout: float = 0.0


class FusedAttention(nn.Module):
    """Attention whose queries, keys and values come from one product, with biases."""

    def __init__(self, sizes: Sizes, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = sizes.heads, causal, sizes.dropout
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention of a sequence to itself."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=self.causal
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class FusedBlock(nn.Module):
    """A layer of GPT-2, or of ViT if it is not causal."""

    def __init__(self, sizes: Sizes, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention = FusedAttention(sizes, causal=causal)
        self.up, self.down = (
            nn.Linear(sizes.width, sizes.hidden),
            nn.Linear(sizes.hidden, sizes.width),
        )
        self.dropout = nn.Dropout(sizes.dropout)
        self.approximate = "tanh" if causal else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and perceptron, each added to what it reads."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate=self.approximate)
        return x + self.dropout(self.down(hidden))


class Gpt2(nn.Module):
    """GPT-2 (Radford et al., 2019)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(FusedBlock(sizes, causal=True) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the next tokens."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.head(self.norm(x)), labels)


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions, in which queries share keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        inner = (sizes.kv_heads or sizes.heads) * self.head
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, inner, bias=False)
        self.v = nn.Linear(sizes.width, inner, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.shares = inner < sizes.width

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention of a sequence to itself; `turns` are cosines and sines of its positions."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(
            _rotated(q, turns), _rotated(k, turns), v, is_causal=True, enable_gqa=self.shares
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def _rotated(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = turns
    one, other = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-other, one], dim=-1) * sine


class GatedPerceptron(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The perceptron."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Several SwiGLU perceptrons, of which each token uses two, as in Mixtral.

    Rows are sorted by expert and multiplied group by group.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        count, width, hidden = sizes.experts, sizes.width, sizes.hidden
        self.count = count
        self.router = nn.Linear(width, count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the results of two perceptrons."""
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).float().softmax(-1).topk(2, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        by_expert, order = torch.sort(chosen.reshape(-1))
        # `histc` counts floating-point numbers on CPUs, integers elsewhere.
        counted = by_expert.float() if x.device.type == "cpu" else by_expert.int()
        counts = torch.histc(counted, bins=self.count, min=0, max=self.count - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = functional.grouped_mm(
            rows[order // 2], self.gate_up.transpose(-2, -1), offs=ends
        ).chunk(2, dim=-1)
        made = functional.grouped_mm(
            functional.silu(gate) * up, self.down.transpose(-2, -1), offs=ends
        )
        made = made * weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        return made[inverse].view(*chosen.shape, -1).sum(1).view_as(x)


class RotaryBlock(nn.Module):
    """A layer of Llama, or of Mixtral if it has experts."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(sizes.width, eps=1e-5) for _ in range(2))
        self.attention = GroupedAttention(sizes)
        self.mlp: nn.Module = Experts(sizes) if sizes.experts else GatedPerceptron(sizes)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention and perceptron, each added to what it reads."""
        x = x + self.attention(self.norm1(x), turns)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Llama 3 (arXiv:2407.21783) with tied embeddings; Mixtral (arXiv:2401.04088) with experts."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(RotaryBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.half = sizes.width // sizes.heads // 2

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the next tokens."""
        x = self.tokens(input_ids)
        turns = self._turns(input_ids.shape[1], x)
        for block in self.blocks:
            x = block(x, turns)
        return next_token_loss(self.head(self.norm(x)), labels)

    def _turns(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the positions."""
        exponents = torch.arange(self.half, device=like.device) / -self.half
        angles = torch.arange(length, device=like.device)[:, None] * 500_000.0**exponents
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Vit(nn.Module):
    """ViT (arXiv:2010.11929)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        patches = (sizes.length // sizes.patch) ** 2
        self.patch = nn.Conv2d(3, sizes.width, sizes.patch, stride=sizes.patch)
        self.first = nn.Parameter(torch.zeros(1, 1, sizes.width))
        self.positions = nn.Parameter(torch.zeros(1, patches + 1, sizes.width))
        self.blocks = nn.ModuleList(FusedBlock(sizes, causal=False) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the classes."""
        tokens = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)[:, 0]).float(), labels)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of each token but the first, in float32."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A model and its batch, described but not built.

    Attributes:
        make: builds the module.
        sizes: of the module.
        batch: number of sequences or images of a step.
        dtype: of parameters and images.
    """

    make: Callable[[Sizes], nn.Module]
    sizes: Sizes
    batch: int
    dtype: torch.dtype = torch.bfloat16

    def build(self, device: str | torch.device) -> nn.Module:
        """The model in training mode; its weights are the same on all ranks."""
        torch.manual_seed(0)
        with torch.device(device):
            model = self.make(self.sizes)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        return model.to(self.dtype).train()

    def inputs(self, device: str | torch.device) -> Inputs:
        """A batch of random tokens, or of random images with labels."""
        random = {"generator": torch.Generator().manual_seed(1)}
        sizes = self.sizes
        if self.make is Vit:
            images = torch.randn(self.batch, 3, sizes.length, sizes.length, **random)
            labels = torch.randint(sizes.vocabulary, (self.batch,), **random)
            made = {"images": images.to(self.dtype), "labels": labels}
        else:
            ids = torch.randint(sizes.vocabulary, (self.batch, sizes.length), **random)
            made = {"input_ids": ids, "labels": ids}
        return {name: tensor.to(device) for name, tensor in made.items()}

    def export_arguments(self) -> tuple[nn.Module, tuple[()], Inputs]:
        """The arguments of `export_model`: the model and its batch, without weights."""
        return self.build("meta"), (), self.inputs("meta")
