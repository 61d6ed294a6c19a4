"""Functions of torch, and writes, on sharded results: the values and gradients of one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from runtime.cases.shared_operands import SHARINGS, Sharing, compare, errors, values
from torch import nn
from torch.nn import functional

from autoshard.errors import PlanError
from autoshard.runtime.global_tensors.global_tensor import GlobalTensor

Tensor = torch.Tensor


@dataclass(frozen=True)
class Operands:
    """What functions are called with.

    Attributes:
        z: the sharded result.
        p: a plain tensor of its shape.
        w: a plain matrix of five rows.
        t: a plain number.
        y: labels of classes along dim 1, some of them ignored.
    """

    z: Any
    p: Tensor
    w: Tensor
    t: Tensor
    y: Tensor

    @property
    def kept(self) -> Tensor:
        """Labels of which none is ignored."""
        return self.y.clamp(min=0)

    @property
    def weight(self) -> Tensor:
        """A weight of each class."""
        return torch.linspace(0.5, 2.0, self.z.shape[1], dtype=torch.float64)


Function = Callable[[Operands], Any]

ELEMENTS: dict[str, Function] = {
    "z + p": lambda o: o.z + o.p,
    "p + z": lambda o: o.p + o.z,
    "p - z": lambda o: o.p - o.z,
    "p * z": lambda o: o.p * o.z,
    "1 - z": lambda o: 1 - o.z,
    "2 / z": lambda o: 2 / (o.z.square() + 1),
    "z ** 2": lambda o: o.z**2,
    "2 ** z": lambda o: 2**o.z,
    "z // 0.3": lambda o: o.z.detach() // 0.3,
    "z % p": lambda o: o.z.detach() % o.p.detach(),
    "a plain number": lambda o: o.z * o.t,
    "a plain row": lambda o: o.z * o.p[:1],
    "a plain column": lambda o: o.p[:, :1] - o.z,
    "comparisons": lambda o: [o.z > o.p, o.p <= o.z, o.z == o.z, (o.z > 0) & (o.p > 0)],
    "where": lambda o: torch.where(o.z > 0, o.z, o.p),
    "where of a plain mask": lambda o: torch.where(o.p > 0, o.z, 0.0),
    "clamp": lambda o: o.z.clamp(-0.5, 0.5) + torch.maximum(o.z, o.p),
    "lerp": lambda o: o.p.lerp(o.z, o.t),
    "activations": lambda o: [f(o.z) for f in (functional.gelu, functional.silu, torch.tanh)],
    "masked_fill": lambda o: o.z.masked_fill(o.p > 0, -1e9).softmax(-1),
    "casts": lambda o: [o.z.float().double(), o.z.to(torch.float32), (10 * o.z).long()],
    "no casts": lambda o: [o.z.double(), o.z.to(o.p), o.z.contiguous(), o.z.clone()],
    "detach": lambda o: o.z.detach() * o.p + o.z.data,
    "like": lambda o: [torch.zeros_like(o.z), torch.ones_like(o.z) * o.z, o.z.new_zeros(2, 3)],
    "noise": lambda o: [o.z + torch.randn_like(o.z), functional.dropout(o.z, 0.5)],
    "several": lambda o: (o.z * o.p).sum() + (o.z.mean(0) * o.w[0]).sum() + o.z.std(),
}
REDUCTIONS: dict[str, Function] = {
    "sum": lambda o: [o.z.sum(), o.z.sum(0), o.z.sum(1, keepdim=True), torch.sum(o.z, (0, 1))],
    "mean": lambda o: [o.z.mean(), torch.mean(o.z, dim=-1), o.z.square().mean()],
    "sum of integers": lambda o: [(o.z > 0).sum(), (o.z > 0).sum(1), (10 * o.z).long().sum(0)],
    "half precision": lambda o: [(60000 * o.z.detach().abs().half() / 9).mean().isfinite()],
    "norms": lambda o: [o.z.norm(p=p) for p in (1, 2, 3.5, float("inf"))],
    "norms along dims": lambda o: [o.z.norm(dim=0), torch.linalg.vector_norm(o.z, 2, dim=1)],
    "norm of zeros": lambda o: (o.z * 0).norm(),
    "matrix norms": lambda o: [torch.linalg.norm(o.z), torch.linalg.matrix_norm(o.z, 2)],
    "extrema": lambda o: [o.z.max(), o.z.min(), o.z.amax(0), o.z.amin((0, 1)), *o.z.max(1)],
    "ties": lambda o: [o.z.round().clamp(-1, 1).amax(0), o.z.round().clamp(-1, 1).max()],
    "products": lambda o: [o.z.prod(), (o.z * (o.z > 0)).prod(0)],
    "logsumexp": lambda o: [o.z.logsumexp((0, 1)), o.z.logsumexp(1, keepdim=True)],
    "deviations": lambda o: [o.z.std(), o.z.var(0), *torch.var_mean(o.z, 1)],
    "truth": lambda o: [torch.isfinite(o.z).all(), (o.z > 2).any(), (o.z > 0).any(0)],
    "argmax": lambda o: [o.z.argmax(), o.z.argmax(1), o.z.argmin(0)],
    "accuracy": lambda o: [(o.z.argmax(1) == o.y).sum().item(), *o.z.topk(3).indices],
    "the accuracy that everybody prints": lambda o: (o.z.argmax(-1) == o.y).float().mean(),
    "order": lambda o: [*o.z.sort(descending=True), *o.z.topk(2, 0), o.z.quantile(0.3)],
    "sums along": lambda o: [o.z.cumsum(0), o.z.cumsum(1), o.z.flip(0, 1), o.z.roll(1, 0)],
    "softmax": lambda o: [o.z.softmax(-1), functional.log_softmax(o.z, 0)],
    "normalised": lambda o: [
        functional.normalize(o.z),
        functional.layer_norm(o.z, (o.z.shape[1],), o.w[0], o.w[1]),
        functional.cosine_similarity(o.z, o.p),
        functional.cosine_similarity(o.p, o.z, dim=0),
    ],
    "python": lambda o: [float(o.z.detach().sum()), f"{o.z.detach().mean():.3f}", len(o.z)],
    "numpy": lambda o: [o.z.detach().cpu().numpy().sum(), o.z.tolist()[1][2]],
    "covariance": lambda o: [torch.cov(o.z), torch.linalg.svdvals(o.z)],
}
PRODUCTS: dict[str, Function] = {
    "z @ w.T": lambda o: o.z @ o.w.T,
    "w @ z.T": lambda o: o.w @ o.z.T,
    "z.T @ p": lambda o: o.z.T @ o.p,
    "linear": lambda o: [functional.linear(o.z, o.w), functional.linear(o.z, o.w, o.w[:, 0])],
    "linear by name": lambda o: functional.linear(bias=o.w[:, 0], weight=o.w, input=o.z),
    "the result as weight": lambda o: functional.linear(o.w, o.z),
    "similarity": lambda o: functional.linear(
        functional.normalize(o.z), functional.normalize(o.w.detach())
    ),
    "einsum": lambda o: [
        torch.einsum("ij,kj->ik", o.z, o.w),
        torch.einsum("ij,ij->", o.z, o.p),
        torch.einsum("ij->ji", o.z),
    ],
    "outer": lambda o: [torch.outer(o.z[0], o.z[1]), torch.dot(o.z[0], o.p[0])],
    "cdist": lambda o: torch.cdist(o.z, o.w),
    "embedding, table first": lambda o: torch.embedding(o.z, o.y % len(o.z)),
    "embedding": lambda o: functional.embedding((o.z > 0).long(), o.w),
    "one_hot": lambda o: functional.one_hot(o.z.argmax(1), o.z.shape[1]),
}
VIEWS: dict[str, Function] = {
    "transposed": lambda o: [o.z.t() * 2, o.z.T + 1, o.z.transpose(0, 1), o.z.permute(1, 0) * 1],
    "reshaped": lambda o: [
        o.z.view(-1) * 2,
        o.z.reshape(-1, 2),
        o.z.flatten(),
        o.z.unflatten(1, (2, -1)),
    ],
    "new dims": lambda o: [o.z[:, None] * o.p[None], o.z[None].expand(3, -1, -1) * 2],
    "squeezed": lambda o: [o.z[:, :1].squeeze() * 2, o.z.unsqueeze(0).squeeze()],
    "indexed": lambda o: [
        o.z[2],
        o.z[:, 3],
        o.z[1:5],
        o.z[:, 1:5],
        o.z[-7:],
        o.z[1::2],
        o.z[..., 0],
    ],
    "indexed by lists": lambda o: [o.z[:, [0, 2]], o.z[[0, 2]], o.z[torch.arange(3)]],
    "indexed by labels": lambda o: o.z[torch.arange(len(o.y)), o.kept % o.z.shape[1]],
    "indexed by masks": lambda o: [o.z[o.z > 0], o.z[o.y >= 0], o.z.masked_select(o.p > 0)],
    "gather": lambda o: [
        o.z.gather(1, o.kept[:, None]),
        torch.take_along_dim(o.z, o.z.argsort(1), 1),
    ],
    "index_select": lambda o: [
        o.z.index_select(0, o.kept),
        o.z.index_select(1, torch.tensor([1, 3])),
    ],
    "joined": lambda o: [torch.cat([o.z, o.p], 1), torch.cat([o.p, o.z]), torch.stack([o.z, o.p])],
    "divided": lambda o: [*o.z.chunk(2, -1), *o.z.split(3), *o.z.unbind(1), *o.z.tensor_split(2)],
    "iterated": lambda o: [row * 2 for row in o.z],
    "repeated": lambda o: [o.z.repeat(2, 1), o.z.repeat_interleave(2, 0), o.z.unfold(0, 2, 1)],
    "diagonals": lambda o: [o.z.diagonal() * 2, o.z.tril(), torch.triu(o.z, 1)],
    "padded": lambda o: functional.pad(o.z, (1, 2)),
}
LOSSES: dict[str, Function] = {
    "cross_entropy": lambda o: functional.cross_entropy(o.z, o.y),
    "cross_entropy, weighted": lambda o: functional.cross_entropy(o.z, o.y, weight=o.weight),
    "cross_entropy, smoothed": lambda o: functional.cross_entropy(
        o.z, o.y, weight=o.weight, label_smoothing=0.1
    ),
    "cross_entropy of probabilities": lambda o: functional.cross_entropy(o.z, o.p.softmax(-1)),
    "cross_entropy, not reduced": lambda o: functional.cross_entropy(o.z, o.y, reduction="none"),
    "cross_entropy, summed": lambda o: functional.cross_entropy(
        target=o.y, input=o.z, reduction="sum"
    ),
    "cross_entropy, deprecated": lambda o: functional.cross_entropy(o.z, o.kept, None, None, 1),
    "nll_loss": lambda o: functional.nll_loss(o.z.log_softmax(-1), o.y, weight=o.weight),
    "a module": lambda o: nn.CrossEntropyLoss(ignore_index=1)(o.z, o.kept),
    "mse_loss": lambda o: [functional.mse_loss(o.z, o.p), functional.mse_loss(o.p, o.z)],
    "mse_loss, weighted": lambda o: functional.mse_loss(o.z, o.p, weight=o.p.detach().abs()),
    "l1_loss": lambda o: functional.l1_loss(o.z, o.p, reduction="sum"),
    "huber_loss": lambda o: [functional.huber_loss(o.z, o.p), functional.smooth_l1_loss(o.p, o.z)],
    "binary_cross_entropy": lambda o: functional.binary_cross_entropy(
        o.z.sigmoid(), o.p.detach().sigmoid(), weight=o.weight
    ),
    "binary_cross_entropy_with_logits": lambda o: functional.binary_cross_entropy_with_logits(
        o.z, o.p.sigmoid(), pos_weight=o.weight
    ),
    "kl_div": lambda o: [
        functional.kl_div(o.z.log_softmax(-1), o.p.softmax(-1), reduction=reduction)
        for reduction in ("batchmean", "sum", "none")
    ],
    "triplet": lambda o: functional.triplet_margin_loss(o.z, o.p, o.p.roll(1, 0)),
    "cosine embedding": lambda o: functional.cosine_embedding_loss(o.z, o.p, torch.ones(len(o.y))),
    "margins": lambda o: [
        functional.multi_margin_loss(o.z, o.kept % o.z.shape[1]),
        functional.margin_ranking_loss(o.z, o.p, torch.ones_like(o.p)),
        functional.soft_margin_loss(o.z, o.p.detach().sign()),
        functional.hinge_embedding_loss(o.z, o.p.detach().sign()),
    ],
    "poisson": lambda o: functional.poisson_nll_loss(o.z, o.p.detach().abs()),
}


def _write(change: Callable[[Operands], object], o: Operands) -> object:
    change(o)
    return o.z * 1


def _rows_and_views(o: Operands) -> object:
    """Views of one tensor see what is written through each other."""
    one, other, column = o.z[1], o.z[1], o.z[:, 2]
    one.mul_(o.t)
    column.add_(1.0)
    return [one * 1, other * 2, column * 3, o.z * 1]


def _after_use(o: Operands) -> object:
    """What was computed before a write keeps its value and its gradient."""
    before = (o.z + o.p).sum()
    o.z[:, 1] = 0.0
    return [before, o.z * 1]


def _strided(z: Tensor) -> None:
    """Views if the tensor is contiguous, otherwise copies, into which writes do not reach it."""
    for tensor in (z, z.t(), z[:, :3]):
        tensor.contiguous()[0].mul_(2.0)
        tensor.reshape(-1)[3:6].fill_(1.0)
        tensor.flatten()[1].add_(3.0)


@torch.no_grad()
def _without_gradients(o: Operands) -> None:
    o.z[0] = 5.0
    o.z[:, 1].mul_(2.0)


def _in_inference_mode(o: Operands) -> object:
    with torch.inference_mode():
        z = o.z * 1
        z[0] = 5.0
        z[:, 1].mul_(2.0)
        correct = (z.argmax(1) == o.y).sum().item()
        return [correct, z.mean().item(), functional.cross_entropy(z, o.y).item(), z.sum().item()]


def _of_a_copy(o: Operands) -> object:
    copied = o.z.clone()
    copied[..., 3:] = -1e9
    return [copied.softmax(-1), o.z * 1]


WRITES: dict[str, Callable[[Operands], object]] = {
    "a column": lambda o: o.z.__setitem__((slice(None), 0), -1e4),
    "a row": lambda o: o.z.__setitem__(2, 100.0),
    "a row of a tensor": lambda o: o.z.__setitem__(2, o.p[0]),
    "a column of a tensor": lambda o: o.z.__setitem__((slice(None), 2), o.p[:, 0] * o.t),
    "a padded vocabulary": lambda o: o.z.__setitem__((..., slice(6, None)), -1e9),
    "a slice": lambda o: o.z.__setitem__(slice(1, 3), o.p[3:5]),
    "a mask": lambda o: o.z.__setitem__(o.z > 0, 0),
    "a plain mask": lambda o: o.z.__setitem__(o.p > 0, o.t),
    "a list": lambda o: o.z.__setitem__((slice(None), [1, 3]), o.p[:, :2]),
    "indices": lambda o: o.z.__setitem__((torch.arange(3), torch.tensor([1, 2, 3])), o.p[0, :3]),
    "a row, in place": lambda o: o.z[2].mul_(3),
    "a row of a transpose": lambda o: o.z.t()[1].fill_(0),
    "a chain of views": lambda o: o.z.view(-1, 2)[1:4].t().unsqueeze(0)[0, 1].copy_(o.p[0, :3]),
    "a diagonal": lambda o: o.z.diagonal().mul_(o.t),
    "all of it": lambda o: o.z.mul_(o.t).add_(o.p).clamp_(-1, 1),
    "relu in place": lambda o: functional.relu(o.z, inplace=True),
    "index_fill_": lambda o: o.z.index_fill_(0, torch.tensor([0, 2]), 1.0),
    "index_add_": lambda o: o.z.index_add_(0, torch.tensor([0, 2]), o.p[:2]),
    "scatter_": lambda o: o.z.scatter_(1, o.kept[:, None], 2.0),
    "copy_": lambda o: o.z.copy_(o.p[0]),
    "detached": lambda o: o.z.detach()[0].fill_(5.0),
    "data": lambda o: o.z.data[:, 0].fill_(5.0),
    "out": lambda o: torch.add(o.z.detach(), o.p.detach(), out=o.z.data),
    "copies and views by strides": lambda o: _strided(o.z),
    "without gradients": _without_gradients,
}
FUNCTIONS: Mapping[str, Function] = {
    **ELEMENTS,
    **REDUCTIONS,
    **PRODUCTS,
    **VIEWS,
    **LOSSES,
    **{f"write: {name}": partial(_write, change) for name, change in WRITES.items()},
    "write: rows and views": _rows_and_views,
    "write: after use": _after_use,
    "write: into a copy": _of_a_copy,
    "inference mode": _in_inference_mode,
}
CUBES: Mapping[str, Function] = {
    "logits of tokens": lambda o: functional.cross_entropy(o.z.flatten(0, 1), _ids(o.z.shape[:2])),
    "logits, transposed": lambda o: functional.cross_entropy(
        o.z.transpose(1, 2), _ids(o.z.shape[:2]).view(o.z.shape[:2])
    ),
    "shifted logits": lambda o: functional.cross_entropy(
        o.z[:, :-1].reshape(-1, o.z.shape[-1]), _ids((o.z.shape[0], o.z.shape[1] - 1))
    ),
    "bmm": lambda o: [torch.bmm(o.z, o.p.transpose(1, 2)), o.z @ o.w.T, o.w @ o.z.mT],
    "heads": lambda o: o.z.view(*o.z.shape[:2], 2, 3).transpose(1, 2) * 2,
    "pooled": lambda o: [o.z.mean((1, 2)), o.z[:, -1], o.z.amax(1), o.z.permute(2, 0, 1) * 2],
    "masked mean": lambda o: (o.z * (o.p > 0)).sum(1) / (o.p > 0).sum(1).clamp(min=1),
}


def _ids(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()) % 6


def operands(sharing: Sharing, *, shared: bool) -> tuple[Operands, dict[str, Tensor]]:
    """What functions are called with, and the leaves that get gradients."""
    torch.manual_seed(0)
    shape = sharing.shape
    leaves = {
        name: torch.randn(size, dtype=torch.float64, requires_grad=True)
        for name, size in {"z": shape, "p": shape, "w": (5, shape[-1]), "t": ()}.items()
    }
    y = torch.randint(0, min(shape[1], 6), shape[:1])
    y[2] = -100
    result = leaves["z"] * 1.0
    z = sharing.result(result) if shared else result
    return Operands(z, leaves["p"], leaves["w"], leaves["t"], y), leaves


@dataclass(frozen=True)
class Shared:
    """All functions, on tensors that are shared in one way."""

    sharing: Sharing
    functions: Mapping[str, Function]

    def __call__(self) -> None:
        errors({name: partial(self._compare, name) for name in self.functions})

    def _compare(self, name: str) -> None:
        both = []
        for shared in (False, True):
            given, leaves = operands(self.sharing, shared=shared)
            torch.manual_seed(2)
            both.append(values(self.functions[name](given), leaves))
        compare(name, both[1], both[0])


def _used(z: Tensor) -> Tensor:
    """A result of which something was computed that needs it in backward."""
    (z[:, :2] * z[:, 2:4]).sum()
    return z


SAVED: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "softmax": lambda z: z.softmax(-1),
    "exp, transposed": lambda z: z.exp().t(),
    "a used result": _used,
}
"""Results that autograd has saved."""
HIDDEN_WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda t: t.data.fill_(5.0),
    "a column of data": lambda t: t.data.__setitem__((slice(None), 0), 5.0),
    "a row, detached": lambda t: t.detach()[0].mul_(2.0),
    "data of a row": lambda t: t[1].data.fill_(5.0),
    "without gradients": torch.no_grad()(lambda t: t.fill_(5.0)),
    "out": lambda t: torch.add(t.detach(), 1.0, out=t.data),
}
"""Writes that autograd does not see."""


@dataclass(frozen=True)
class HiddenWrites:
    """Writes without autograd's knowledge into what it has saved: an error that says what to do."""

    sharing: Sharing

    def __call__(self) -> None:
        errors(
            {
                f"{saved}: {write}": partial(self._refused, saved, write)
                for saved in SAVED
                for write in HIDDEN_WRITES
            }
        )

    def _refused(self, saved: str, write: str) -> None:
        result = SAVED[saved](operands(self.sharing, shared=True)[0].z)
        if isinstance(result, GlobalTensor):
            try:
                HIDDEN_WRITES[write](result)
            except PlanError as error:
                assert "t = t.clone()" in str(error)  # noqa: PT017  `errors` collects all
            else:
                raise AssertionError("it is not refused")


CASES: dict[str, Callable[[], None]] = {str(s): Shared(s, FUNCTIONS) for s in SHARINGS} | {
    str(cube): Shared(cube, CUBES) for s in SHARINGS for cube in (replace(s, shape=(*s.shape, 6)),)
}
CASES |= {f"hidden writes: {s}": HiddenWrites(s) for s in SHARINGS}
LONG = tuple(
    name for name in CASES if name.rpartition(": ")[2] not in {str(s) for s in SHARINGS[2::3]}
)
"""Every way to share a dim is in one of the cases that stay."""
