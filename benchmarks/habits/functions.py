"""What training code computes from results: functions, writes, losses, metrics.

Each takes the step of the loop and a result of shape (rows, classes). Those of `RESULTS` return a
tensor of the same shape, so that a loop can chain them.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autoshard


@dataclass
class Parts:
    """All that a loop trains or calls.

    Attributes:
        one: planned, or the same on one device.
        make_two: makes another one when a loop first uses it.
        plain: a network that is never planned.
        square: a plain parameter of shape (classes, classes).
        row: a plain parameter of shape (classes,).
        scale: a plain number.
    """

    one: nn.Module
    make_two: Callable[[], nn.Module]
    plain: nn.Module
    square: nn.Parameter
    row: nn.Parameter
    scale: nn.Parameter

    @cached_property
    def two(self) -> nn.Module:
        """Another planned model."""
        return self.make_two()

    @property
    def planned(self) -> dict[str, nn.Module]:
        """The planned models that were used so far."""
        return {"one": self.one} | ({"two": self.two} if "two" in vars(self) else {})

    def named(self) -> dict[str, nn.Parameter]:
        """All parameters so far."""
        modules = {**self.planned, "plain": self.plain}
        found = {
            f"{owner}.{name}": p for owner, m in modules.items() for name, p in m.named_parameters()
        }
        return found | {"square": self.square, "row": self.row, "scale": self.scale}


@dataclass
class Step:
    """A step of a loop.

    Attributes:
        parts: models and parameters.
        inputs: the batch.
        y: labels, of which some are ignored.
        draw: the source of all that a habit chooses.
    """

    parts: Parts
    inputs: dict[str, Tensor]
    y: Tensor
    draw: random.Random

    @property
    def kept(self) -> Tensor:
        """Labels of which none is ignored."""
        return self.y.clamp(min=0)

    def two(self) -> Tensor:
        """The result of the second planned model."""
        result: Tensor = self.parts.two(self.inputs["x"])
        return result

    def plain(self) -> Tensor:
        """The result of the plain network."""
        result: Tensor = self.parts.plain(self.inputs["x"])
        return result

    def noise(self, *shape: int) -> Tensor:
        """A plain tensor, the same on all ranks."""
        generator = torch.Generator().manual_seed(self.draw.randrange(1000))
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def weight(self, z: Tensor) -> Tensor:
        """A weight of each class."""
        return torch.linspace(0.5, 2.0, z.shape[1], dtype=torch.float64)


Function = Callable[[Step, Any], Any]


def _order(s: Step, size: int) -> list[int]:
    return s.draw.sample(range(size), size)


def _another_call(s: Step, z: Tensor) -> Tensor:
    inputs = {name: value.roll(1, 0) for name, value in s.inputs.items()}
    again: Any = s.parts.one(**inputs)
    while not isinstance(again, Tensor):
        again = next(iter(again.values() if isinstance(again, dict) else again))
    return z - 0.5 * again


def _unit(z: Tensor, dim: int = 1) -> Tensor:
    """Rows of length 1; of a row that is zero, the usual eps of 1e-12 makes numbers of rounding."""
    return functional.normalize(z, dim=dim, eps=1e-2)


RESULTS: dict[str, Function] = {
    "z * plain": lambda s, z: z * s.plain(),
    "plain - z": lambda s, z: s.plain() - z,
    "plain / z": lambda s, z: s.plain() / (z.square() + 1),
    "z + two": lambda s, z: z + s.two(),
    "two * z": lambda s, z: s.two() * z,
    "z * scale": lambda s, z: z * s.parts.scale,
    "scale.exp() * z": lambda s, z: s.parts.scale.exp() * z,
    "row - z": lambda s, z: s.parts.row - z,
    "z @ square": lambda s, z: z @ s.parts.square,
    "square @ z.T": lambda s, z: (s.parts.square @ z.T).T,
    "linear": lambda s, z: functional.linear(z, s.parts.square, s.parts.row),
    "addmm": lambda s, z: torch.addmm(s.parts.row, z, s.parts.square),
    "einsum": lambda s, z: torch.einsum("ij,jk->ik", z, s.parts.square),
    "bmm": lambda s, z: torch.bmm(z[None], s.parts.square[None])[0],
    "z + noise": lambda s, z: z + 0.1 * s.noise(*z.shape),
    "noise of a column": lambda s, z: s.noise(z.shape[0], 1) * z,
    "where": lambda s, z: torch.where(z > 0, z, s.plain()),
    "where of a plain mask": lambda s, z: torch.where(s.noise(*z.shape) > 0, z, 0.0),
    "masked_fill": lambda s, z: z.masked_fill(s.noise(*z.shape) > 1, -3.0),
    "masked_fill of its own": lambda _, z: z.masked_fill(z > 0, 0.5),
    "maximum": lambda s, z: torch.maximum(s.plain(), z),
    "clamp": lambda _, z: z.clamp(-0.3, 0.4),
    "clamp of tensors": lambda s, z: z.clamp(max=s.noise(*z.shape).abs()),
    "lerp": lambda s, z: s.plain().lerp(z, s.parts.scale),
    "addcmul": lambda s, z: torch.addcmul(s.plain(), z, s.noise(*z.shape), value=0.5),
    "tanh": lambda _, z: torch.tanh(z),
    "gelu": lambda _, z: functional.gelu(z),
    "softmax": lambda s, z: z.softmax(s.draw.choice((-1, 0, 1))),
    "log_softmax": lambda s, z: functional.log_softmax(z, dim=s.draw.choice((-1, -2))),
    "normalize": lambda s, z: _unit(z, s.draw.choice((0, 1))),
    "layer_norm": lambda s, z: functional.layer_norm(z, z.shape[1:], s.parts.row, s.weight(z)),
    "temperature": lambda s, z: z / s.draw.choice((0.5, 2, z.shape[0], z.shape[1] ** 0.5)),
    "z - its mean": lambda s, z: z - z.mean(s.draw.choice((0, 1)), keepdim=True),
    "z / its norm": lambda _, z: z / z.norm(),
    "z / its deviation": lambda _, z: (z - z.mean(0)) / (z.std(0) + 1.0),
    "z - its maximum": lambda _, z: z - z.amax(1, keepdim=True),
    "z * its norm, detached": lambda _, z: z * z.detach().norm(dim=1, keepdim=True),
    "straight through": lambda _, z: z + (z.round() - z).detach(),
    "cat, then slice": lambda s, z: torch.cat([s.plain(), z], s.draw.choice((0, 1)))[
        -z.shape[0] :, -z.shape[1] :
    ],
    "cat of two": lambda s, z: torch.cat([z, s.two()], 1)[:, ::2],
    "stack": lambda s, z: torch.stack([z, s.plain()]).mean(0),
    "stack in the middle": lambda s, z: torch.stack([s.plain(), z], 1)[:, 1],
    "roll": lambda s, z: z.roll(1, s.draw.choice((0, 1))),
    "flip": lambda s, z: z.flip(s.draw.choice((0, 1))),
    "sort": lambda s, z: z.sort(s.draw.choice((0, 1))).values,
    "cumsum": lambda s, z: z.cumsum(s.draw.choice((0, 1))),
    "topk, scattered": lambda _, z: torch.zeros_like(z).scatter(
        1, z.topk(2).indices, z.topk(2).values
    ),
    "rows by a list": lambda s, z: z[_order(s, z.shape[0])],
    "columns by a list": lambda s, z: z[:, _order(s, z.shape[1])],
    "index_select": lambda s, z: z.index_select(0, torch.tensor(_order(s, z.shape[0]))),
    "index_select of columns": lambda s, z: z.index_select(1, torch.tensor(_order(s, z.shape[1]))),
    "gather": lambda s, z: z.gather(
        1, torch.tensor([_order(s, z.shape[1]) for _ in range(z.shape[0])])
    ),
    "take_along_dim": lambda _, z: torch.take_along_dim(z, z.argsort(1), 1),
    "a column of labels": lambda s, z: z * z[torch.arange(len(s.y)), s.kept][:, None],
    "a masked row": lambda s, z: z + z[s.y >= 0].mean(0),
    "a row": lambda s, z: z - z[s.draw.randrange(z.shape[0])],
    "a column": lambda s, z: z * z[:, s.draw.randrange(z.shape[1])].unsqueeze(1),
    "slices": lambda _, z: z + z[-1:, :] * z[:, :1],
    "iterated": lambda _, z: torch.stack([row * n for n, row in enumerate(z)]),
    "unbind": lambda _, z: torch.stack(z.unbind(1), 1),
    "chunks": lambda _, z: torch.cat(z.chunk(2)[::-1]).roll(1, 0),
    "splits": lambda _, z: torch.cat(z.split(3, 1)[::-1], 1),
    "view": lambda _, z: (z.contiguous().view(-1) * 2).view_as(z),
    "reshape": lambda _, z: z.reshape(-1, z.shape[0]).reshape(z.shape) * 1.5,
    "flatten": lambda _, z: z.flatten().unflatten(0, tuple(z.shape)) + 1,
    "transposed": lambda s, z: (z.t() * s.noise(z.shape[1], 1)).t(),
    "permuted": lambda _, z: z.permute(1, 0).contiguous().permute(1, 0),
    "new dims": lambda _, z: (z[:, None, :] * z[:, :, None]).mean(1),
    "expanded": lambda _, z: z[None].expand(3, -1, -1).mean(0),
    "repeat_interleave": lambda _, z: (
        z.repeat_interleave(2, 0)[::2] * z.repeat(1, 2)[:, : z.shape[1]]
    ),
    "pad": lambda _, z: functional.pad(z, (1, 2), value=1.0)[:, 1:-2],
    "unfold": lambda _, z: z.unfold(1, 2, 1).mean(-1).mean(1, keepdim=True) * z,
    "tril": lambda _, z: z.tril() + torch.triu(z, 1) * 2,
    "diagonal": lambda _, z: z * z.diagonal().sum(),
    "casts": lambda s, z: z + z.detach().float().to(z) + z.to(s.noise(1)),
    "cdist": lambda s, z: torch.cdist(z, s.parts.square) + z,
    "outer": lambda _, z: torch.outer(z[:, 0], z[0]),
    "similarity": lambda s, z: functional.linear(
        _unit(z), functional.normalize(s.parts.square.detach())
    ),
    "cosine_similarity": lambda s, z: z * functional.cosine_similarity(s.plain(), z)[:, None],
    "embedding": lambda s, z: functional.embedding(z.argmax(1), s.parts.square) * z,
    "one_hot": lambda _, z: z * functional.one_hot(z.argmax(1), z.shape[1]),
    # Contiguous, since PyTorch draws in the order of memory.
    "noise like z": lambda _, z: z + 0.1 * torch.randn_like(z.contiguous()),
    "dropout outside": lambda _, z: functional.dropout(z.contiguous(), 0.5),
    "dropout module outside": lambda _, z: nn.Dropout(0.25)(z.contiguous()),
    "full_tensor": lambda _, z: autoshard.full_tensor(z) * 2,
    "a plain layer": lambda s, z: nn.functional.linear(torch.relu(z), s.parts.square),
    "a checkpoint": lambda _, z: torch.utils.checkpoint.checkpoint(
        lambda h: torch.tanh(h) * h, z, use_reentrant=False
    ),
    "another call": _another_call,
    "a hook": lambda _, z: _hooked(z * 1, lambda gradient: gradient * 2),
    "a hook that clips": lambda _, z: _hooked(z * 1, lambda gradient: gradient.clamp(-0.01, 0.01)),
    "a gradient": lambda _, z: (
        z + torch.autograd.grad(z.square().sum(), z, retain_graph=True)[0].detach()
    ),
}
"""Functions that return a tensor of the same shape."""


def _hooked(z: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if z.requires_grad:
        z.register_hook(hook)
    return z


def _row(s: Step, z: Tensor) -> int:
    return s.draw.randrange(-z.shape[0], z.shape[0])


def _column(s: Step, z: Tensor) -> int:
    return s.draw.randrange(-z.shape[1], z.shape[1])


def _columns(s: Step, z: Tensor) -> list[int]:
    return s.draw.sample(range(z.shape[1]), 2)


Write = Callable[[Step, Tensor], object]

WRITES: dict[str, Write] = {
    "a column": lambda s, z: z.__setitem__((slice(None), _column(s, z)), -2.0),
    "a row": lambda s, z: z.__setitem__(_row(s, z), 3.0),
    "an element": lambda s, z: z.__setitem__((_row(s, z), _column(s, z)), 3.0),
    "a row of a tensor": lambda s, z: z.__setitem__(_row(s, z), s.plain()[0]),
    "a row of a row": lambda s, z: z.__setitem__(_row(s, z), z[_row(s, z)].clone() * 2),
    "a column of a tensor": lambda s, z: z.__setitem__(
        (slice(None), _column(s, z)), s.plain()[:, 0] * s.parts.scale
    ),
    "a padded vocabulary": lambda _, z: z.__setitem__((..., slice(4, None)), -5.0),
    "a slice": lambda s, z: z.__setitem__(slice(1, 3), s.plain()[2:4]),
    "a strided slice": lambda s, z: z.__setitem__(slice(None, None, 2), s.parts.row),
    "a block": lambda _, z: z[1:4, 2:5].add_(1.0),
    "a mask": lambda _, z: z.__setitem__(z > 0, -1),
    "a plain mask": lambda s, z: z.__setitem__(s.noise(*z.shape) > 0, s.parts.scale),
    "a mask of rows": lambda s, z: z.__setitem__(s.y < 0, 0.5),
    "columns by a list": lambda s, z: z.__setitem__(
        (slice(None), _columns(s, z)), s.plain()[:, :2]
    ),
    "rows by a list": lambda s, z: z.__setitem__([0, 2], s.plain()[:2]),
    "labels": lambda s, z: z.__setitem__((torch.arange(len(s.y)), s.kept), 1.0),
    "labels of a tensor": lambda s, z: z.__setitem__(
        (torch.arange(len(s.y)), s.kept), s.plain()[:, 0]
    ),
    "index_put, summed": lambda s, z: z.index_put_((s.kept % 3,), s.plain(), accumulate=True),
    "a row, in place": lambda s, z: z[_row(s, z)].mul_(3),
    "a row, by augmented assignment": lambda s, z: _augmented(z, _row(s, z)),
    "a row of a transpose": lambda s, z: z.t()[_column(s, z)].fill_(0),
    "a chain of views": lambda s, z: z[2:5].t().unsqueeze(0)[0, 1].copy_(s.noise(3)),
    "a flat view": lambda _, z: z.contiguous().view(-1)[3:9].fill_(0.5),
    "a view of views": lambda _, z: z.unsqueeze(1).squeeze(1).narrow(0, 1, 2)[1].mul_(2.0),
    "an expanded select": lambda _, z: z.select(0, 1).unsqueeze(-1).squeeze(-1).add_(2.0),
    "a diagonal": lambda s, z: z.diagonal().mul_(s.parts.scale),
    "all of it": lambda s, z: z.mul_(s.parts.scale).add_(s.plain()).clamp_(-1, 1),
    "relu in place": lambda _, z: functional.relu(z, inplace=True),
    "dropout in place": lambda _, z: z.mul_(functional.dropout(torch.ones(z.shape), 0.5)),
    "index_fill_": lambda s, z: z.index_fill_(s.draw.choice((0, 1)), torch.tensor([0, 2]), 1.0),
    "index_add_": lambda s, z: z.index_add_(0, torch.tensor([0, 2]), s.plain()[:2]),
    "index_copy_": lambda s, z: z.index_copy_(0, torch.tensor([1, 0]), s.plain()[:2]),
    "scatter_": lambda s, z: z.scatter_(1, s.kept[:, None], 2.0),
    "scatter_add_": lambda s, z: z.scatter_add_(1, s.kept[:, None], s.plain()[:, :1]),
    "masked_fill_": lambda s, z: z.masked_fill_(s.noise(*z.shape) > 1, 0.0),
    "masked_scatter_": lambda s, z: z.masked_scatter_(s.noise(*z.shape) > 1, s.plain()),
    "copy_": lambda s, z: z.copy_(s.parts.row),
    "data": lambda s, z: z.data[:, _column(s, z)].fill_(0.5),
    "detached": lambda s, z: z.detach()[_row(s, z)].fill_(0.5),
    "zero_ of a slice": lambda _, z: z[:2].zero_(),
    "two views": lambda _, z: _two_views(z),
    "out": lambda s, z: torch.add(z.detach(), s.noise(*z.shape), out=z.data),
    "without gradients": lambda s, z: torch.no_grad()(lambda: z[_row(s, z)].fill_(1.0))(),
}
"""Writes into a result."""


def _augmented(z: Tensor, row: int) -> None:
    z[row] *= 3


def _two_views(z: Tensor) -> None:
    one, other, column = z[1], z[1], z[:, 2]
    one.mul_(2.0)
    column.add_(1.0)
    other.add_(column[1] * 0.5)


def written(write: Write, *, to_copy: bool) -> Function:
    """A function that writes into a result, or into a copy, and returns it."""

    def function(s: Step, z: Tensor) -> Tensor:
        target = z.clone() if to_copy else z
        write(s, target)
        return target * 1 if to_copy else target

    return function


INPUTS: dict[str, Function] = {
    "requires a gradient": lambda _, x: x.clone().requires_grad_(),
    "times a parameter": lambda s, x: x * s.parts.scale,
    "not contiguous": lambda _, x: x.t().contiguous().t(),
    "a view": lambda _, x: torch.stack([x, x])[1],
    "expanded": lambda _, x: x[:1].expand_as(x),
    "written": lambda _, x: x.clone().index_fill_(1, torch.tensor([1]), 0.5),
    "detached": lambda s, x: (x * s.parts.scale).detach(),
}
"""What is done to inputs that are no tokens."""

LOSSES: dict[str, Function] = {
    "cross_entropy": lambda s, z: functional.cross_entropy(z, s.y),
    "cross_entropy, weighted": lambda s, z: functional.cross_entropy(z, s.y, weight=s.weight(z)),
    "cross_entropy, smoothed": lambda s, z: functional.cross_entropy(
        z, s.y, weight=s.weight(z), label_smoothing=0.1
    ),
    "cross_entropy of probabilities": lambda s, z: functional.cross_entropy(
        z, s.plain().softmax(-1)
    ),
    "cross_entropy, by hand": lambda s, z: (
        -(z.log_softmax(-1)[torch.arange(len(s.y)), s.kept] * (s.y >= 0)).sum()
    ),
    "cross_entropy, not reduced": lambda s, z: (
        functional.cross_entropy(z, s.y, reduction="none").sum() / (s.y >= 0).sum()
    ),
    "cross_entropy, summed": lambda s, z: (
        functional.cross_entropy(z, s.y, reduction="sum") / len(s.y)
    ),
    "cross_entropy of kept rows": lambda s, z: functional.cross_entropy(z[s.y >= 0], s.y[s.y >= 0]),
    "cross_entropy of tokens": lambda s, z: functional.cross_entropy(
        z[:, None].expand(-1, 2, -1).reshape(-1, z.shape[1]), s.y.repeat_interleave(2)
    ),
    "cross_entropy, shifted": lambda s, z: functional.cross_entropy(z[:-1], s.y[1:]),
    "a module": lambda s, z: nn.CrossEntropyLoss(ignore_index=1)(z, s.kept),
    "nll_loss": lambda s, z: functional.nll_loss(z.log_softmax(-1), s.y, weight=s.weight(z)),
    "mse_loss": lambda s, z: functional.mse_loss(z, s.plain()),
    "mse_loss, plain first": lambda s, z: functional.mse_loss(s.plain(), z),
    "mse_loss of two": lambda s, z: functional.mse_loss(z, s.two()),
    "l1_loss": lambda s, z: functional.l1_loss(z, s.noise(*z.shape), reduction="sum"),
    "smooth_l1_loss": lambda s, z: functional.smooth_l1_loss(z, s.two().detach()),
    "huber_loss": lambda s, z: functional.huber_loss(s.plain(), z),
    "binary_cross_entropy": lambda s, z: functional.binary_cross_entropy(
        z.sigmoid(), s.noise(*z.shape).sigmoid(), weight=s.weight(z)
    ),
    "binary_cross_entropy_with_logits": lambda s, z: functional.binary_cross_entropy_with_logits(
        z, s.noise(*z.shape).sigmoid(), pos_weight=s.weight(z)
    ),
    "kl_div": lambda s, z: functional.kl_div(
        z.log_softmax(-1), s.two().softmax(-1), reduction="batchmean"
    ),
    "kl_div of a teacher": lambda s, z: functional.kl_div(
        z.log_softmax(-1), s.plain().detach().softmax(-1), reduction="sum"
    ),
    "triplet": lambda s, z: functional.triplet_margin_loss(z, s.plain(), s.two()),
    "cosine embedding": lambda s, z: functional.cosine_embedding_loss(
        z, s.plain(), torch.ones(len(s.y))
    ),
    "multi_margin_loss": lambda s, z: functional.multi_margin_loss(z, s.kept),
    "margin_ranking_loss": lambda s, z: functional.margin_ranking_loss(
        z, s.plain(), torch.ones_like(z)
    ),
    "soft_margin_loss": lambda s, z: functional.soft_margin_loss(z, s.noise(*z.shape).sign()),
    "hinge_embedding_loss": lambda s, z: functional.hinge_embedding_loss(
        z, s.noise(*z.shape).sign()
    ),
    "poisson": lambda s, z: functional.poisson_nll_loss(z, s.noise(*z.shape).abs()),
    "gaussian": lambda s, z: functional.gaussian_nll_loss(z, s.plain(), z.square() + 0.1),
    "contrast": lambda s, z: functional.cross_entropy(
        _unit(z) @ functional.normalize(s.two()).T * s.parts.scale.exp(),
        torch.arange(len(s.y)),
    ),
    "contrast with a plain tower": lambda s, z: functional.cross_entropy(
        functional.normalize(s.plain()) @ _unit(z).T,
        torch.arange(len(s.y)),
    ),
    "square, mean": lambda _, z: z.square().mean(),
    "sum": lambda _, z: z.sum(),
    "norm": lambda _, z: z.norm(),
    "logsumexp": lambda _, z: z.logsumexp(1).mean(),
    "maximum": lambda _, z: z.max() + z.amin(0).sum(),
    "median": lambda _, z: z.median(1).values.sum(),
    "deviation": lambda _, z: z.std() + z.var(0).sum(),
    "entropy": lambda _, z: torch.distributions.Categorical(logits=z).entropy().mean(),
    "the idiom of the readme": lambda _, z: autoshard.full_tensor(z.square().mean()),
    "several": lambda s, z: (
        functional.cross_entropy(z, s.y)
        + 0.1 * s.two().square().mean()
        + s.parts.scale * (z[:, 0] * s.plain()[:, 1]).sum()
    ),
    "a masked mean": lambda s, z: (z.mean(1) * (s.y >= 0)).sum() / (s.y >= 0).sum().clamp(min=1),
    "a penalty": lambda s, z: (
        functional.cross_entropy(z, s.y)
        + 0.01 * sum(autoshard.full_tensor(p.square().sum()) for p in s.parts.one.parameters())
    ),
    "a penalty of norms": lambda s, z: (
        functional.cross_entropy(z, s.y) + 0.01 * sum(p.norm() for p in s.parts.two.parameters())
    ),
    "with a number": lambda s, z: 0.5 * z.square().sum() / s.inputs["x"].shape[0],
}
"""Numbers to be minimised."""

METRICS: dict[str, Function] = {
    "accuracy": lambda s, z: (z.argmax(1) == s.y).sum().item(),
    "accuracy, as a mean": lambda s, z: (z.argmax(-1) == s.y).float().mean(),
    "accuracy of kept rows": lambda s, z: (z.argmax(-1)[s.y >= 0] == s.y[s.y >= 0]).sum(),
    "accuracy of the best two": lambda s, z: (z.topk(2).indices == s.kept[:, None]).any(1).sum(),
    "loss": lambda s, z: functional.cross_entropy(z, s.y).item(),
    "mean": lambda _, z: z.mean().item(),
    "probability": lambda _, z: z.softmax(-1).max(-1).values,
    "numpy": lambda _, z: float(z.detach().cpu().numpy().sum()),
    "tolist": lambda _, z: z.tolist()[-1],
    "formatted": lambda _, z: float(f"{z.detach().mean():.6f}"),
    "norm": lambda _, z: z.norm(dim=1),
    "quantile": lambda _, z: z.quantile(0.3),
    "histogram": lambda s, z: torch.bincount(z.argmax(1), minlength=z.shape[1]) + 0 * len(s.y),
    "confusion": lambda s, z: torch.zeros(z.shape[1], z.shape[1]).index_put_(
        (s.kept, z.argmax(1)), torch.ones(len(s.y)), accumulate=True
    ),
    "extrema": lambda _, z: [z.max().item(), z.min(0).values, z.argmin()],
    "finite": lambda _, z: bool(torch.isfinite(z).all()),
    "a plain tensor": lambda s, z: (z - s.plain()).abs().max(),
    "another result": lambda s, z: (z * s.two()).sum(1),
    "covariance": lambda _, z: torch.cov(z.T),
    "rows": lambda s, z: [row.sum().item() for row in z][: len(s.y)],
    "appended": lambda _, z: torch.cat([z[:1], z[1:]]).sum(0),
}
"""What loops print."""

CONTEXTS: Mapping[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
