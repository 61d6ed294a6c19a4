"""Models that several areas of the suite plan and run, small and built from config classes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from autoshard.graph import Graph, export_model, load_graph
from autoshard.plan import Plan

Case = tuple[nn.Module, dict[str, Any]]
"""A model and the keyword arguments of its forward."""

Planner = Callable[..., Plan]
"""Plans a case on a mesh with options, and asserts that the checker finds nothing wrong."""


class Mlp(nn.Module):
    """Two linear layers with biases."""

    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp(batch: int = 16, features: int = 64, hidden: int = 128, outputs: int = 64) -> Case:
    """The MLP of MASE's own auto-sharding test, with its sizes as defaults."""
    return Mlp(features, hidden, outputs), {"x": torch.randn(batch, features)}


class Bias(nn.Module):
    """One parameter, one operator that is bound by memory: few enough strategies to try all."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.bias).sum()


class Residual(nn.Module):
    """A layer whose last parameter backward has no need of."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)
        self.shift = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + self.shift


class Residuals(nn.Module):
    """Layers that are alike, and a loss."""

    def __init__(self, layers: int, features: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Residual(features, hidden) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


def residuals(*, layers: int = 3, batch: int = 64, features: int = 32, hidden: int = 128) -> Case:
    """A small stack of residual layers."""
    return Residuals(layers, features, hidden), {"x": torch.randn(batch, features)}


def gpt2(
    *,
    layers: int = 2,
    batch: int = 4,
    sequence: int = 8,
    hidden: int = 32,
    vocabulary: int = 64,
    dropout: float = 0.0,
) -> Case:
    """A small GPT-2 with labels."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=4,
        n_positions=16,
        vocab_size=vocabulary,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    ids = torch.randint(0, 64, (batch, sequence))
    inputs = {
        "input_ids": ids,
        "labels": ids,
        "use_cache": False,
    }
    return transformers.GPT2LMHeadModel(config), inputs


def bert(
    *, layers: int = 2, batch: int = 4, sequence: int = 8, hidden: int = 32, heads: int = 4
) -> Case:
    """A small BERT with a masked-language head, an attention mask and ignored labels."""
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=2 * hidden,
        vocab_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(0, 64, (batch, sequence))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
    mask = torch.ones_like(ids)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
    }
    return transformers.BertForMaskedLM(config), inputs


def llama(*, layers: int = 2, batch: int = 4, sequence: int = 8) -> Case:
    """A small Llama with grouped key and value heads, and labels."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=64,
        max_position_embeddings=16,
    )
    ids = torch.randint(0, 64, (batch, sequence))
    inputs = {
        "input_ids": ids,
        "labels": ids,
        "use_cache": False,
    }
    return transformers.LlamaForCausalLM(config), inputs


def t5(*, layers: int = 2, batch: int = 4, sequence: int = 8) -> Case:
    """A small T5 with labels, whose decoder reads what the encoder makes in every layer."""
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    ids = torch.randint(0, 64, (batch, sequence))
    inputs = {"input_ids": ids, "labels": ids.flip(1), "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), inputs


class ImageClassifier(nn.Module):
    """A ResNet of bottleneck blocks with the loss of labels."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        config = transformers.ResNetConfig(
            embedding_size=width,
            hidden_sizes=[width, 2 * width],
            depths=[1, 2],
            num_labels=classes,
        )
        self.model = transformers.ResNetForImageClassification(config)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(pixels).logits, labels)


def resnet(*, batch: int = 4, width: int = 8, size: int = 32) -> Case:
    """A small ResNet with batch norms in training mode, which update running statistics."""
    inputs = {
        "pixels": torch.randn(batch, 3, size, size),
        "labels": torch.randint(0, 8, (batch,)),
    }
    return ImageClassifier(width, 8), inputs


def meta(build: Any, *args: Any, **kwargs: Any) -> Case:
    """A case built on the meta device, so that its size costs nothing."""
    with torch.device("meta"):
        return build(*args, **kwargs)


def graph_of(case: Case) -> Graph:
    """The normalised graph of a case."""
    model, kwargs = case
    return load_graph(export_model(model, (), kwargs))


@cache
def small_graph(build: Callable[[], Case]) -> Graph:
    """The graph of a small model with its default sizes; exported once."""
    return graph_of(meta(build))
