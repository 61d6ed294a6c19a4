"""The models of the published tests in plain torch, exported once on the meta device.

A model that is trained ends in its loss, so that gradients enter at a scalar. Linear
weights are torch's [out, in], so a published `column` is dim 0 here and a `row` dim 1.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from autoshard.graph import Graph, export_model, load_graph


class SquaredError(nn.Module):
    """A model and its mean squared error."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - y).square().mean()


def graph_of(model: nn.Module, **inputs: torch.Tensor) -> Graph:
    """The graph of a model, for inputs by argument name."""
    return load_graph(export_model(model, (), inputs))


def trained(body: nn.Module, x: tuple[int, ...], y: tuple[int, ...]) -> Graph:
    """The graph of a model with its loss, for an input and a target of these shapes."""
    return graph_of(SquaredError(body), x=empty(*x), y=empty(*y))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without contents."""
    return torch.empty(*shape, dtype=dtype, device="meta")


class Function(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def function_graph(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> Graph:
    """The graph of a function."""
    return load_graph(export_model(Function(function), args))


@cache
def mlp(layers: int, batch: int, width: int) -> Graph:
    """Linear layers with biases and a ReLU between each two."""
    modules: list[nn.Module] = []
    with torch.device("meta"):
        for layer in range(layers):
            modules += [nn.Linear(width, width)] + [nn.ReLU()] * (layer < layers - 1)
    return trained(nn.Sequential(*modules), (batch, width), (batch, width))


class Attention(nn.Module):
    """Self-attention with one product for query, key and value, heads outermost."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        split = self.qkv(x).view(batch, sequence, self.heads, 3, width // self.heads)
        split = split.permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            split[0], split[1], split[2], dropout_p=self.dropout
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))


class BertLayer(nn.Module):
    """A layer of BERT with dropout."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention = Attention(width, heads, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + nn.functional.dropout(self.attention(x), self.dropout))
        return self.norm2(
            x + nn.functional.dropout(self.fc2(nn.functional.gelu(self.fc1(x))), self.dropout)
        )


@cache
def bert(batch: int, sequence: int, width: int, heads: int) -> Graph:
    """Two layers of BERT on hidden states."""
    shape = (batch, sequence, width)
    with torch.device("meta"):
        body = nn.Sequential(BertLayer(width, heads), BertLayer(width, heads))
    return trained(body, shape, shape)


class LanguageModel(nn.Module):
    """Embedding, layers, a head, and the cross entropy of the labels."""

    def __init__(self, vocabulary: int, width: int, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.embedding(ids)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def tokens(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Arguments of a language model."""
    ids = empty(batch, sequence, dtype=torch.int64)
    return {"ids": ids, "labels": torch.empty_like(ids)}


@cache
def masked_lm(batch: int, sequence: int, width: int, heads: int, vocabulary: int) -> Graph:
    """BERT with two layers between an embedding and a head."""
    with torch.device("meta"):
        layers = [BertLayer(width, heads) for _ in range(2)]
        model = LanguageModel(vocabulary, width, *layers)
    return graph_of(model, **tokens(batch, sequence))


class TiedEmbedding(nn.Module):
    """Scores of an embedding's own rows, and their cross entropy.

    Written as sums, the targets are one-hot and no maximum is subtracted.
    """

    def __init__(self, vocabulary: int, width: int, *, as_sums: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.as_sums = as_sums

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = nn.functional.linear(self.table(ids), self.table.weight)
        if self.as_sums:
            return (scores.exp().sum(-1).log() - (scores * targets).sum(-1)).mean()
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


@cache
def tied_embedding(
    batch: int, sequence: int, width: int, vocabulary: int, *, as_sums: bool
) -> Graph:
    """A table that is embedding and head at once."""
    with torch.device("meta"):
        model = TiedEmbedding(vocabulary, width, as_sums=as_sums)
    given = tokens(batch, sequence)
    targets = empty(batch, sequence, vocabulary) if as_sums else given["labels"]
    return graph_of(model, ids=given["ids"], targets=targets)


class Experts(nn.Module):
    """Top-2 experts of a capacity each, written with products as in GShard."""

    def __init__(self, width: int, hidden: int, *, group: int, experts: int) -> None:
        super().__init__()
        self.group, self.capacity = group, 2 * group // experts
        self.gate = nn.Linear(width, experts, bias=False)
        self.wi = nn.Parameter(torch.empty(experts, width, hidden))
        self.wo = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.reshape(-1, self.group, x.shape[-1])
        shares = self.gate(grouped).softmax(-1)
        first = (shares == shares.amax(-1, keepdim=True)).float()
        rest = shares * (1 - first)
        chosen = first + (rest == rest.amax(-1, keepdim=True)).float()
        place = chosen.cumsum(1) * chosen
        slots = (place.unsqueeze(-1) == torch.arange(1, self.capacity + 1)).float()
        inside = torch.einsum("gsec,gsm->egcm", slots, grouped)
        inside = torch.einsum("egcm,emh->egch", inside, self.wi).relu()
        inside = torch.einsum("egch,ehm->egcm", inside, self.wo)
        weighted = slots * (shares * chosen).unsqueeze(-1)
        return torch.einsum("gsec,egcm->gsm", weighted, inside).reshape(x.shape)


class ExpertLayer(nn.Module):
    """Attention, then experts."""

    def __init__(self, width: int, heads: int, hidden: int, *, group: int, experts: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, 0.0)
        self.experts = Experts(width, hidden, group=group, experts=experts)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.experts(x))


@cache
def experts(batch: int = 64, sequence: int = 16, width: int = 64, heads: int = 16) -> Graph:
    """One layer of 16 experts."""
    shape = (batch, sequence, width)
    with torch.device("meta"):
        body = ExpertLayer(width, heads, 4 * width, group=32, experts=16)
    return trained(body, shape, shape)


@cache
def expert_lm(vocabulary: int = 32, width: int = 64, heads: int = 16) -> Graph:
    """A language model with a plain layer and one of experts."""
    with torch.device("meta"):
        layer = ExpertLayer(width, heads, 4 * width, group=32, experts=16)
        model = LanguageModel(vocabulary, width, BertLayer(width, heads), layer)
    return graph_of(model, **tokens(64, 16))


@cache
def convolutions(layers: int, batch: int, pixels: int, channels: int, *, norm: bool) -> Graph:
    """Convolutions of stride 2 with batch norm (or without), ReLU and pooling."""
    modules: list[nn.Module] = []
    with torch.device("meta"):
        for _ in range(layers):
            modules.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False))
            if norm:
                modules.append(nn.BatchNorm2d(channels, track_running_stats=False))
            modules += [nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1)]
    left = pixels >> layers
    shape = (batch, channels)
    return trained(nn.Sequential(*modules), (*shape, pixels, pixels), (*shape, left, left))
