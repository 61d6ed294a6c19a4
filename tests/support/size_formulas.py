"""Numbers that forward computes from a dynamic batch size, as Python code writes them.

Functions of hidden activations h of shape [batch, 8].
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Formula = Callable[[torch.Tensor], torch.Tensor]

FEATURES = 8

NUMBERS: dict[str, Formula] = {
    "mean": lambda h: h.sum() / h.shape[0],
    "times a reciprocal": lambda h: h.sum() * (1.0 / h.shape[0]),
    "whole reciprocal": lambda h: h.sum() * (1 / h.shape[0]),
    "times": lambda h: h.sum() * h.shape[0],
    "a third": lambda h: h.sum() * (h.shape[0] / 3),
    "root": lambda h: h.sum() * h.shape[0] ** 0.5,
    "reciprocal root": lambda h: h.sum() * h.shape[0] ** -0.5,
    "power": lambda h: h.sum() * pow(h.shape[0], 0.25),
    "math.pow": lambda h: h.sum() * math.pow(2.0, 0.5) * h.shape[0] ** -1,
    "square": lambda h: h.sum() / h.shape[0] ** 2,
    "exponent": lambda h: h.sum() * 0.9 ** h.shape[0],
    "sym_sqrt": lambda h: h.sum() * torch.sym_sqrt(h.shape[0]),
    "sym_float": lambda h: h.sum() * torch.sym_float(h.shape[0]),
    "sym_int": lambda h: h.sum() * torch.sym_int(h.shape[0] / 3),
    "trunc": lambda h: h.sum() * math.trunc(h.shape[0] / 3),
    "half": lambda h: h.sum() * (h.shape[0] // 2),
    "rounded up": lambda h: h.sum() * -(-h.shape[0] // 5),
    "remainder": lambda h: h.sum() * (h.shape[0] % 3),
    "remainder of a float": lambda h: h.sum() * ((h.shape[0] * 0.5) % 3),
    "at least": lambda h: h.sum() * torch.sym_max(h.shape[0], 12),
    "at most": lambda h: h.sum() * torch.sym_min(h.shape[0], 12),
    "max and min": lambda h: h.sum() * max(h.shape[0], 12) / min(h.shape[0], 12),
    "at most a float": lambda h: h.sum() * torch.sym_min(h.shape[0] / 3, 3.5),
    "negative": lambda h: h.sum() * (-h.shape[0] / 3),
    "shifted": lambda h: h.sum() * (h.shape[0] << 2) / (h.shape[0] >> 1),
    "bits": lambda h: h.sum() * (h.shape[0] & 6),
    "a comparison": lambda h: h.sum() * (h.shape[0] > 10),
    "one of two": lambda h: (
        h.sum() * torch.sym_ite(h.shape[0] > 10, h.shape[0] * 2, h.shape[0] + 7)
    ),
    "unbiased": lambda h: h.var(0, unbiased=False).sum() * h.shape[0] / (h.shape[0] - 1),
    "products": lambda h: h.sum() / (h.shape[0] * h.shape[1] * 2 + 1),
    "elements": lambda h: h.sum() / h.numel(),
    "all sizes": lambda h: h.sum() / math.prod(h.shape) + sum(h.shape),
}
ARGUMENTS: dict[str, Formula] = {
    "clamp": lambda h: h.clamp(-1 / h.shape[0], 2.0 / h.shape[0]),
    "lerp": lambda h: torch.lerp(h, h * h, 1.0 / h.shape[0]),
    "pow": lambda h: h.abs().add(1).pow(1.0 / h.shape[0]),
    "softmax with a temperature": lambda h: (h / h.shape[0] ** 0.5).softmax(-1),
    "attention": lambda h: functional.scaled_dot_product_attention(
        h[None] * (1 / h.shape[0] ** 0.5), h[None], h[None]
    ),
    "add with alpha": lambda h: torch.add(h, h * h, alpha=1 / h.shape[0]),
    "sub with alpha": lambda h: torch.sub(h, h * h, alpha=h.shape[0]),
    "addcmul": lambda h: torch.addcmul(h, h, h, value=1 / h.shape[0]),
    "addmm": lambda h: torch.addmm(h, h, torch.eye(FEATURES, dtype=h.dtype), beta=3 / h.shape[0]),
    "masked_fill": lambda h: h.masked_fill(h > 0, 1 / h.shape[0]),
    "where": lambda h: torch.where(h > 0, h, 1 / h.shape[0]),
    "leaky_relu": lambda h: functional.leaky_relu(h, 1 / h.shape[0]),
    "elu": lambda h: functional.elu(h, 1 / h.shape[0]),
    "threshold": lambda h: functional.threshold(h, 1 / h.shape[0], 0.0),
    "added": lambda h: h + 1 / h.shape[0],
    "a tensor": lambda h: h / torch.tensor(h.shape[0]),
    "a tensor of a float": lambda h: h * torch.tensor(h.shape[0] / 3, dtype=h.dtype),
    "a tensor of several": lambda h: h[:, :3] * torch.tensor([h.shape[0], 1, h.shape[0] // 2]),
    "as_tensor": lambda h: h * torch.as_tensor(h.shape[0]),
    "as_tensor of a shape": lambda h: h[:, :2] * torch.as_tensor(h.shape),
    "new_tensor": lambda h: h * h.new_tensor([h.shape[0] / 7]),
    "full": lambda h: h * torch.full((), h.shape[0] / 3, dtype=h.dtype),
    "logarithm": lambda h: h * torch.full((), h.shape[0], dtype=h.dtype).log(),
    "new_full": lambda h: h * h.new_full((FEATURES,), h.shape[0] / 3),
    "fill_": lambda h: h * torch.zeros_like(h).fill_(1 / h.shape[0]),
    "weights of a loss": lambda h: functional.binary_cross_entropy_with_logits(
        h, h.sigmoid(), pos_weight=torch.full((FEATURES,), h.shape[0] / 2, dtype=h.dtype)
    ),
    "positions": lambda h: h * (torch.arange(h.shape[0]) / h.shape[0])[:, None],
    "running means": lambda h: h.cumsum(0) / torch.arange(1, h.shape[0] + 1)[:, None],
    "a mask": lambda h: h.new_ones(h.shape[0], h.shape[0]).tril(-1) @ h / h.shape[0],
    "a diagonal": lambda h: h.new_ones(FEATURES, FEATURES).tril(h.shape[0] - 10).sum() * h,
    "a row": lambda h: h[h.shape[0] - 1],
    "a rolled batch": lambda h: h.roll(h.shape[0] // 2, 0) * h,
    "a repeated row": lambda h: h[:1].repeat(h.shape[0], 1) / h.shape[0],
    "each row's loss": lambda h: functional.cross_entropy(
        h, torch.zeros(h.shape[0], dtype=torch.long), reduction="none"
    ),
    "an average of losses": lambda h: (
        functional.nll_loss(
            h.log_softmax(-1), torch.ones(h.shape[0], dtype=torch.long), reduction="none"
        )
        * (1.0 / h.shape[0])
    ),
}
EXACT: dict[str, Formula] = NUMBERS | ARGUMENTS


class Hidden(nn.Module):
    """Formulas of hidden activations; the results by name.

    Attributes:
        formulas: by name.
    """

    def __init__(self, formulas: dict[str, Formula]) -> None:
        super().__init__()
        self.formulas = formulas
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = x @ self.weight
        return {name: formula(h) for name, formula in self.formulas.items()}
