"""Decoder-only transformers of given dimensions, built on the meta device.

One reference module has the shapes of all published models: the projections of attention and of
the MLP or its experts, norms, embedding and head. What differs between them in pointwise operators
only, such as the kind of positions, is left out where it changes no shape.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from autoshard.graph import MixedPrecision, export_model


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Dimensions of a decoder-only transformer.

    Attributes:
        hidden: width of the residual stream.
        layers: number of layers.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        ffn: width of the MLP; of one expert if there are experts.
        vocab: size of the vocabulary.
        gated: True if the MLP has a gate.
        tied: True if embedding and head share a weight.
        head_size: width of a query head; hidden / heads if 0.
        experts: number of routed experts of a layer; 0 for a dense model.
        active: number of experts of a token.
        shared: width of the MLP that every token passes beside its experts; 0 for none.
        dense_layers: number of the first layers that have an MLP of width `dense_ffn` instead of
            experts.
        dense_ffn: width of the MLP of those layers.
        latent: ranks of the compressed queries and of the compressed keys and values, and widths
            of the part of a query head without and with positions and of a value head, of
            multi-head latent attention; empty for attention by heads.
        clamp: what the factors of the activation of experts are clamped to; 0 if they are not.
        expert_biases: True if what experts return has a bias, beside those of `biases`. That of
            their first product is added by the product itself.
        norm: `rms` or `layer`.
        activation: `silu`, `gelu` or `squared_relu`.
        rotary: True if queries and keys are rotated by their positions.
        biases: True if projections have biases.
        float32_loss: False if the loss reads logits in bfloat16, as fused kernels do.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    head_size: int = 0
    experts: int = 0
    active: int = 0
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    latent: tuple[int, ...] = ()
    clamp: float = 0.0
    expert_biases: bool = False
    norm: str = "rms"
    activation: str = "silu"
    rotary: bool = True
    biases: bool = False
    float32_loss: bool = True

    @property
    def width(self) -> int:
        """Width of a query head."""
        return self.head_size or self.hidden // self.heads

    def shortened(self, layers: int) -> "Dimensions":
        """The dimensions of a model of fewer layers."""
        return replace(self, layers=layers, dense_layers=min(self.dense_layers, layers))


@dataclass(frozen=True, slots=True)
class Batch:
    """What a program computes at once.

    Attributes:
        sequences: number of sequences, of all data-parallel ranks together.
        tokens: of a sequence.
        fused_attention: False if attention writes its matrix of probabilities.
        training: False for a program of forward alone.
    """

    sequences: int
    tokens: int
    fused_attention: bool = True
    training: bool = True


class Norm(nn.Module):
    """RMSNorm or LayerNorm."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size, eps=1e-5) if kind == "rms" else nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[B, T, d] -> [B, T, d]."""
        normed: torch.Tensor = self.norm(x)
        return normed


def _activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "squared_relu":
        return functional.relu(x).square()
    return functional.silu(x) if kind == "silu" else functional.gelu(x)


class Mlp(nn.Module):
    """An MLP, with a gate or without."""

    def __init__(self, dims: Dimensions, width: int) -> None:
        super().__init__()
        self.kind = dims.activation
        self.up = nn.Linear(dims.hidden, width, bias=dims.biases)
        self.gate = nn.Linear(dims.hidden, width, bias=dims.biases) if dims.gated else None
        self.down = nn.Linear(width, dims.hidden, bias=dims.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[B, T, d] -> [B, T, d]."""
        up = self.up(x)
        if self.gate is None:
            inner = _activation(up, self.kind)
        else:
            inner = _activation(self.gate(x), self.kind) * up
        out: torch.Tensor = self.down(inner)
        return out


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention by heads."""

    def __init__(self, dims: Dimensions, *, fused: bool) -> None:
        super().__init__()
        self.dims, self.fused = dims, fused
        width = dims.width
        self.q = nn.Linear(dims.hidden, dims.heads * width, bias=dims.biases)
        self.k = nn.Linear(dims.hidden, dims.kv_heads * width, bias=dims.biases)
        self.v = nn.Linear(dims.hidden, dims.kv_heads * width, bias=dims.biases)
        self.o = nn.Linear(dims.heads * width, dims.hidden, bias=dims.biases)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x[B, T, d], cos[T, h], sin[T, h] -> [B, T, d]."""
        dims, width = self.dims, self.dims.width
        q = self.q(x).unflatten(-1, (dims.heads, width)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (dims.kv_heads, width)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (dims.kv_heads, width)).transpose(1, 2)
        if dims.rotary:
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if self.fused:
            grouped = dims.kv_heads != dims.heads
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=grouped
            )
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) * width**-0.5
            mixed = torch.matmul(functional.softmax(scores, dim=-1), v)
        out: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        q_rank, kv_rank, plain, rotary, value = dims.latent
        self.q_down = nn.Linear(dims.hidden, q_rank, bias=False)
        self.q_norm = Norm(q_rank, "rms")
        self.q_up = nn.Linear(q_rank, dims.heads * (plain + rotary), bias=False)
        self.kv_down = nn.Linear(dims.hidden, kv_rank, bias=False)
        self.k_rotary = nn.Linear(dims.hidden, rotary, bias=False)
        self.kv_norm = Norm(kv_rank, "rms")
        self.k_up = nn.Linear(kv_rank, dims.heads * plain, bias=False)
        self.v_up = nn.Linear(kv_rank, dims.heads * value, bias=False)
        self.o = nn.Linear(dims.heads * value, dims.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x[B, T, d], cos[T, r], sin[T, r] -> [B, T, d]."""
        heads = self.dims.heads
        _, _, plain, rotary, value = self.dims.latent
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (heads, plain + rotary))
        q = q.transpose(1, 2)
        q = torch.cat((q[..., :plain], _rotated(q[..., plain:], cos, sin)), dim=-1)
        compressed = self.kv_norm(self.kv_down(x))
        k = self.k_up(compressed).unflatten(-1, (heads, plain)).transpose(1, 2)
        v = self.v_up(compressed).unflatten(-1, (heads, value)).transpose(1, 2)
        one = _rotated(self.k_rotary(x).unsqueeze(1), cos, sin)
        k = torch.cat((k, one.expand(-1, heads, -1, -1)), dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class Clamp(nn.Module):
    """The clamped gate and the clamped other half of a tensor, as one tensor again."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[T, f] -> [T, f]."""
        gate, up = x.chunk(2, dim=-1)
        return torch.cat((gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)), dim=-1)


class ExpertBias(nn.Module):
    """A bias of each expert, added in float32 as Megatron-LM does."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """rows[T, d], experts[T] -> [T, d]."""
        return (rows.float() + self.bias[experts]).to(rows.dtype)


class ExpertOut(nn.Module):
    """The activation of experts and their second product, which Megatron-Core's `moe_act` repeats.

    The product itself does not run again in backward.
    """

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        self.down = nn.Parameter(torch.empty(dims.experts, dims.ffn, dims.hidden))
        self.clamp = Clamp(dims.clamp) if dims.clamp else None

    def forward(self, inner: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """inner[T, f], or [T, 2 f] with a gate, ends[E] -> [T, d]."""
        if self.clamp is not None:
            inner = self.clamp(inner)
        if self.dims.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = _activation(gate, self.dims.activation) * up
        else:
            inner = _activation(inner, self.dims.activation)
        return torch._grouped_mm(inner, self.down, offs=ends)  # noqa: SLF001  its only name


class Experts(nn.Module):
    """Routed experts, as transformers runs them with grouped matrix products."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        num, width = dims.experts, dims.ffn
        self.router = nn.Linear(dims.hidden, num, bias=False)
        self.up = nn.Parameter(torch.empty(num, dims.hidden, (1 + dims.gated) * width))
        self.out = ExpertOut(dims)
        self.down_bias = ExpertBias(num, dims.hidden) if dims.expert_biases else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[T, d] -> [T, d]."""
        dims = self.dims
        scores = functional.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(scores, dims.active, dim=-1)
        by_expert, order = torch.sort(ids.reshape(-1))
        rows = x[order // dims.active]
        counts = torch.histc(by_expert.float(), bins=dims.experts, min=0, max=dims.experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        inner = torch._grouped_mm(rows, self.up, offs=ends)  # noqa: SLF001  its only name
        out = self.out(inner, ends)
        if self.down_bias is not None:
            out = self.down_bias(out, by_expert)
        out = out * weights.to(x.dtype).reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device=order.device)
        combined: torch.Tensor = out[inverse].view(-1, dims.active, dims.hidden).sum(dim=1)
        return combined


class ExpertMlp(nn.Module):
    """Routed experts beside an MLP that all tokens pass."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.experts = Experts(dims)
        self.shared = Mlp(dims, dims.shared) if dims.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[B, T, d] -> [B, T, d]."""
        out: torch.Tensor = self.experts(x.flatten(0, 1)).view_as(x)
        return out if self.shared is None else out + self.shared(x)


class Layer(nn.Module):
    """Attention, then an MLP, each behind a norm and beside a residual connection."""

    def __init__(self, dims: Dimensions, *, fused: bool, dense: bool) -> None:
        super().__init__()
        self.attention_norm = Norm(dims.hidden, dims.norm)
        latent = bool(dims.latent)
        self.attention = LatentAttention(dims) if latent else Attention(dims, fused=fused)
        self.mlp_norm = Norm(dims.hidden, dims.norm)
        self.mlp = Mlp(dims, dims.dense_ffn or dims.ffn) if dense else ExpertMlp(dims)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x[B, T, d], cos[T, h], sin[T, h] -> [B, T, d]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """The model; with labels it returns the loss, otherwise logits."""

    def __init__(self, dims: Dimensions, batch: Batch) -> None:
        super().__init__()
        self.float32_loss = dims.float32_loss
        self.embedding = nn.Embedding(dims.vocab, dims.hidden)
        self.layers = nn.ModuleList(
            Layer(
                dims,
                fused=batch.fused_attention,
                dense=not dims.experts or number < dims.dense_layers,
            )
            for number in range(dims.layers)
        )
        self.norm = Norm(dims.hidden, dims.norm)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)
        if dims.tied:
            self.head.weight = self.embedding.weight
        width = dims.latent[3] if dims.latent else dims.width
        # The angles of bfloat16 models are rounded before use.
        for name in ("cos", "sin"):
            table = torch.zeros(batch.tokens, width, dtype=torch.bfloat16)
            self.register_buffer(name, table, persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """ids[B, T], labels[B, T] -> a scalar, or [B, T, v] without labels."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: torch.Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        logits = logits.flatten(0, 1)
        if self.float32_loss:
            logits = logits.float()
        return functional.cross_entropy(logits, labels.flatten())


def export_decoder(
    dims: Dimensions, batch: Batch, reduce_dtype: str, *, is_dynamic: bool = False
) -> bytes:
    """The archive of a model that computes in bfloat16, with parameters in float32.

    Args:
        dims: of the model.
        batch: what it computes at once.
        reduce_dtype: element type in which gradients are reduced.
        is_dynamic: True for a program of any number of sequences but one.
    """
    with torch.device("meta"):
        model = Decoder(dims, batch)
        ids = torch.zeros(batch.sequences, batch.tokens, dtype=torch.long)
    if not batch.training:
        return export_model(model.to(torch.bfloat16).eval(), (ids,))
    policy = MixedPrecision("bfloat16", reduce_dtype)
    size = {0: torch.export.Dim("sequences", min=2)}
    return export_model(
        model.train(),
        (ids, ids),
        mixed_precision=policy,
        dynamic_shapes=(size, size) if is_dynamic else None,
    )
