"""Functions of torch, and writes, on sharded parameters: the values and gradients of one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from runtime.cases.shared_operands import SHARINGS, Sharing, compare, errors, values
from torch import nn
from torch.nn import functional

Function = Callable[[Any], Any]

READS: dict[str, Function] = {
    "sums": lambda w: [w.sum(), w.sum(0) * 2, w.mean(), w.mean(0).norm(), w.mean() + w.sum()],
    "means of means": lambda w: [
        w.mean(0).sum(),
        w.mean(1) + 1,
        w.mean(0).mean(),
        w.square().mean(),
    ],
    "norms": lambda w: [w.norm(), w.norm() ** 2, w.norm(p=1), w.norm(p=float("inf"))],
    "norms along dims": lambda w: [w.norm(dim=0).sum(), w.norm(dim=1).sum(), w.norm(dim=0) * 2],
    "norms of norms": lambda w: [
        w.norm() + w.norm(),
        torch.stack([w.norm(), (w * 2).norm()]).norm(),
    ],
    "norms at once": lambda w: [n * 1 for n in torch._foreach_norm([w, w * 2])],
    "sum of norms": lambda w: [sum(torch._foreach_norm([w, w * 2]))],
    "matrix norms": lambda w: [torch.linalg.matrix_norm(w), torch.linalg.matrix_norm(w, 2)],
    "extrema": lambda w: [w.max(), w.amax(0) * 2, w.amax() - w.amin(), *w.max(0), *w.aminmax()],
    "products": lambda w: [w.prod(), w.prod(0).sum(), w.logsumexp(0).sum(), w.var(0) * 1, w.std()],
    "truth": lambda w: [(w > -100).all(), (w > 1).any(0).sum(), w.isfinite().all(), w.argmax()],
    "views": lambda w: [
        w.t() * 2,
        w.T.sum(1),
        w[None] * 2,
        w.unfold(0, 2, 1) * 1,
        w.diagonal() * 2,
    ],
    "flattened": lambda w: [w.view(-1) * 2, w.flatten() * 1, w.reshape(2, -1).sum(1) * 1],
    "parameters_to_vector": lambda w: nn.utils.parameters_to_vector([w, w]),
    "indexed": lambda w: [w[3].sum(), w[:, 3] * 2, w[1:4] * 2, w[:, 1:4].norm(), w[-1] * w[0]],
    "indexed by tensors": lambda w: [w[torch.tensor([0, 2])] * 2, w[[0, 2]].sum(0), w[w > 0] * 1],
    "order": lambda w: [w.median(), *w.sort(0), *w.abs().topk(2, 0), w.argsort(1)],
    "sums along": lambda w: [w.cumsum(0) * 1, w.cumsum(1) * 1, w.flip(0) * 1, w.roll(1, 1) * 1],
    "softmax": lambda w: [w.softmax(0) * w, w.softmax(1) * w],
    "products of matrices": lambda w: [w @ w.T, w.T @ w, torch.mv(w, w[0]), torch.cdist(w, w)],
    "divided": lambda w: [*(x * 2 for x in w.chunk(2, 1)), *(x * 2 for x in w.split(3, 0))],
    "joined": lambda w: [
        torch.cat([w, w * 2]) * 1,
        torch.cat([w, w * 2], 1).sum(0),
        torch.stack([w, w]),
    ],
    "elements": lambda w: [torch.where(w > 0, w, -w), w.clamp(-0.5, 0.5), w.masked_fill(w > 0, 0)],
    "repeated": lambda w: [
        w.repeat(2, 1),
        w.repeat_interleave(2, 0),
        w[None].expand(2, -1, -1) * 1,
    ],
    "counted": lambda w: [(w > 0).nonzero(), (w > 0).count_nonzero(), torch.histc(w.detach(), 5)],
    "looked up": lambda w: [
        functional.embedding(torch.tensor([[0, 2], [1, 0]]), w) * 1,
        torch.embedding(w, torch.tensor([[0, 2, 1]])).sum(1),
    ],
    "similar": lambda w: [functional.cosine_similarity(w, w * 2 + 1), functional.normalize(w) * 1],
    "statistics": lambda w: [torch.cov(w), torch.corrcoef(w), torch.dist(w, w * 3)],
    "compared": lambda w: [
        torch.allclose(w, w * 1),
        torch.equal(w, w * 1),
        w.sum().item(),
        w.numel(),
    ],
    "triangles": lambda w: [w.tril() * 2, w.triu(1).sum(), functional.pad(w, (1, 1)) * 1],
}
WRITES: dict[str, Function] = {
    "w[0] = 3": lambda w: w.__setitem__(0, 3.0),
    "w[0] = w[1]": lambda w: w.__setitem__(0, w[1]),
    "w[1:3] = w[3:5]": lambda w: w.__setitem__(slice(1, 3), w[3:5].clone()),
    "w[1] = plain": lambda w: w.__setitem__(1, torch.full((w.shape[1],), 2.0, dtype=w.dtype)),
    "w[w > 0] = 0": lambda w: w.__setitem__(w > 0, 0.0),
    "w[[0, 1], [2, 3]] = 5": lambda w: w.__setitem__(([0, 1], [2, 3]), 5.0),
    "w[..., 3:5] = 1": lambda w: w.__setitem__((..., slice(3, 5)), 1.0),
    "w[1:3, 2:5] += 1": lambda w: w.__setitem__((slice(1, 3), slice(2, 5)), w[1:3, 2:5].add_(1)),
    "row": lambda w: w[3].zero_(),
    "column": lambda w: w[:, 1].fill_(7),
    "data of a row": lambda w: w[3].data.zero_(),
    "row of data": lambda w: w.data[1, 2:5].fill_(4),
    "row, detached": lambda w: w.detach()[1].fill_(4),
    "squeezed": lambda w: w[:1].squeeze(0).mul_(3),
    "transposed rows": lambda w: w[2:4].t().zero_(),
    "rows, transposed": lambda w: w.t()[1].fill_(0),
    "new dim": lambda w: w[3].unsqueeze(0).copy_(w[1:2].clone()),
    "flattened": lambda w: w.view(-1)[3:7].mul_(2),
    "reshaped": lambda w: w.reshape(-1)[5].fill_(8),
    "unflattened": lambda w: w.unflatten(1, (2, -1))[3, 1].fill_(8),
    "diagonal": lambda w: w.diagonal().fill_(1),
    "fill_diagonal_": lambda w: w.fill_diagonal_(2),
    "chunk": lambda w: w.chunk(2, 0)[1].add_(1),
    "unbind": lambda w: w.unbind(0)[2].add_(1),
    "split": lambda w: w.split(3, 0)[1].sub_(1),
    "narrow": lambda w: w.narrow(0, 1, 2).mul_(5),
    "select": lambda w: w.select(1, 2).neg_(),
    "permuted": lambda w: w.permute(1, 0)[2, 1:3].fill_(4),
    "movedim": lambda w: w.movedim(0, 1)[3].fill_(8),
    "view of a view": lambda w: w[1:4][1][2:5].fill_(8),
    "view_as": lambda w: w[2].view_as(w[3])[1].fill_(2),
    "masked rows": lambda w: w[2:4].masked_fill_(w[2:4] > 0, 9.0),
    "clamped rows": lambda w: w[1:3].clamp_(-0.1, 0.1),
    "copy of a transpose": lambda w: w[:2].T.copy_(w[2:4].T.clone()),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([0, 2]), 1.0),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([0, 2]), w[3:5].clone()),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([0, 2]), w[3:5].clone()),
    "scatter_": lambda w: w.scatter_(1, w.argsort(1), 0.5),
    "tril_": lambda w: w.tril_(),
    "copy_ of a plain tensor": lambda w: w.copy_(torch.linspace(0, 1, w.shape[1], dtype=w.dtype)),
    "normal_ of a row": lambda w: w[1].normal_(),
    "uniform_ of rows": lambda w: w[2:5].uniform_(),
    "other random numbers": lambda w: w.exponential_().add_(w.clone().cauchy_().clamp_(-1, 1)),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.3),
    "eye_": nn.init.eye_,
}


@dataclass(frozen=True)
class Stored:
    """All functions, on parameters that are stored in one way.

    Attributes:
        sharing: how ranks share them.
        functions: that return what is compared.
        writes: that change the parameter.
    """

    sharing: Sharing
    functions: Mapping[str, Function]
    writes: Mapping[str, Function]

    def __call__(self) -> None:
        cases = {name: partial(self._read, name, f) for name, f in self.functions.items()}
        writes = {name: partial(self._written, name, f) for name, f in self.writes.items()}
        errors(cases | {f"write: {name}": case for name, case in writes.items()})

    def _weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        torch.manual_seed(0)
        full = torch.randn(self.sharing.shape, dtype=torch.float64)
        return nn.Parameter(full), self.sharing.parameter(full)

    def _read(self, name: str, function: Function) -> None:
        expected, found = (values(function(w), {"w": w}) for w in self._weights())
        compare(name, found, expected)

    def _written(self, name: str, write: Function) -> None:
        both = self._weights()
        for weight in both:
            torch.manual_seed(3)
            with torch.no_grad():
                write(weight)
        expected, found = (values(w.detach(), {}) for w in both)
        compare(name, found, expected)


CASES: dict[str, Callable[[], None]] = {str(s): Stored(s, READS, WRITES) for s in SHARINGS}
LONG = tuple(name for name in CASES if name not in {str(s) for s in SHARINGS[::4]})
