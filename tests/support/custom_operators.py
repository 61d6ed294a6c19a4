"""Operators of a model's own, as users register them, and models that call them."""

from typing import Any

import torch
from support.models import Case
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

NAMESPACE = "shardtest"


@torch.library.custom_op(f"{NAMESPACE}::gate", mutates_args=())
def gate(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A fused activation: silu(x + bias) * y."""
    return silu(x + bias) * y


@torch.library.custom_op(f"{NAMESPACE}::gate_backward", mutates_args=())
def gate_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shifted = x + bias
    sigmoid = shifted.sigmoid()
    grad_x = grad * y * sigmoid * (1 + shifted * (1 - sigmoid))
    dims = tuple(range(x.dim() - 1))
    return grad_x, grad * shifted * sigmoid, grad_x.sum(dims)


@torch.library.custom_op(f"{NAMESPACE}::scan", mutates_args=())
def scan(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """A recurrence along dim 1: h[t] = decay * h[t-1] + x[t], with a decay per feature."""
    state, states = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        state = decay * state + step
        states.append(state)
    return torch.stack(states, 1)


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over [batch, heads, sequence, features]."""
    return scaled_dot_product_attention(q, k, v).clone()


@torch.library.custom_op(f"{NAMESPACE}::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@torch.library.custom_op(f"{NAMESPACE}::clamped", mutates_args=())
def clamped(x: torch.Tensor, most: float) -> torch.Tensor:
    """It has no gradient."""
    return x.clamp(-most, most)


def _gate_backward(ctx: Any, grad: torch.Tensor) -> Any:
    return gate_backward(grad, *ctx.saved_tensors)


def _scan_backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, decay = ctx.saved_tensors
    states = scan(x, decay)
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    grad_x = scan(grad.flip(1), decay).flip(1)
    return grad_x, (grad_x * before).sum((0, 1))


def _attend_backward(ctx: Any, grad: torch.Tensor) -> Any:
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        output = scaled_dot_product_attention(*inputs)
    return torch.autograd.grad(output, inputs, grad)


def _like_first(first: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(first)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    ctx.save_for_backward(*inputs)


gate.register_autograd(_gate_backward, setup_context=_save)
scan.register_autograd(_scan_backward, setup_context=_save)
attend.register_autograd(_attend_backward, setup_context=_save)
gate.register_fake(_like_first)
scan.register_fake(_like_first)
attend.register_fake(_like_first)
noisy.register_fake(_like_first)
clamped.register_fake(_like_first)


class Mixer(nn.Module):
    """A block of a language model that calls operators of its own for all but products."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(features, features)
        self.k = nn.Linear(features, features)
        self.v = nn.Linear(features, features)
        self.out = nn.Linear(features, features)
        self.up = nn.Linear(features, 4 * features, bias=False)
        self.side = nn.Linear(features, 4 * features, bias=False)
        self.bias = nn.Parameter(torch.randn(4 * features))
        self.down = nn.Linear(4 * features, features)
        self.decay = nn.Parameter(torch.rand(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(gate(self.up(x), self.side(x), self.bias))
        return scan(x, self.decay).square().mean()


class Clamp(nn.Module):
    """A layer whose output is clamped by an operator without a gradient."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 4 * features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return clamped(self.layer(x), 0.5)


class Noise(nn.Module):
    """A layer that adds noise drawn inside an operator of its own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(self.layer(x))


def mixer(*, batch: int = 4, sequence: int = 8, features: int = 32, heads: int = 4) -> Case:
    """A mixer with double precision, so that differences are differences."""
    return Mixer(features, heads).double(), {
        "x": torch.randn(batch, sequence, features, dtype=torch.float64)
    }


def clamp(*, batch: int = 4, features: int = 16) -> Case:
    return Clamp(features), {"x": torch.randn(batch, features)}


def noise(*, batch: int = 4, features: int = 16) -> Case:
    return Noise(features), {"x": torch.randn(batch, features)}
