"""Models of tables, text and graphs in plain torch; each returns its loss."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.zoo.family import Inputs, perceptron


class Dlrm(nn.Module):
    """DLRM (arXiv:1906.00091): tables of categories, dense features, all pairs' products."""

    def __init__(
        self,
        rows: tuple[int, ...],
        width: int = 128,
        dense: int = 13,
        bottom: tuple[int, ...] = (512, 256),
        top: tuple[int, ...] = (1024, 1024, 512, 256),
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in rows)
        self.bottom = perceptron((dense, *bottom, width))
        vectors = len(rows) + 1
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", row * vectors + column)
        self.top = perceptron((width + row.shape[0], *top, 1))

    def forward(
        self, dense: torch.Tensor, categories: torch.Tensor, clicked: torch.Tensor
    ) -> torch.Tensor:
        low = self.bottom(dense)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([low, *looked_up], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        joined = torch.cat([low, products.index_select(1, self.pairs)], dim=1)
        return functional.binary_cross_entropy_with_logits(self.top(joined)[:, 0], clicked)


def clicks(batch: int, tables: int, dense: int) -> Inputs:
    """Inputs of click prediction: categorical and dense features, and labels."""
    return {
        "dense": torch.randn(batch, dense),
        "categories": torch.randint(0, 16, (batch, tables)),
        "clicked": torch.rand(batch).round(),
    }


class DeepFm(nn.Module):
    """DeepFM (arXiv:1703.04247): a factorization machine beside a perceptron."""

    def __init__(
        self, rows: int = 1_000_000, fields: int = 39, width: int = 16, hidden: int = 400
    ) -> None:
        super().__init__()
        self.linear, self.factors = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        self.deep = perceptron((fields * width, hidden, hidden, hidden, 1))

    def forward(
        self, dense: torch.Tensor, categories: torch.Tensor, clicked: torch.Tensor
    ) -> torch.Tensor:
        factors = self.factors(categories)
        squares = factors.sum(1).square() - factors.square().sum(1)
        first = self.linear(categories)[..., 0].sum(1) + dense.sum(1)
        logits = first + 0.5 * squares.sum(1) + self.deep(factors.flatten(1))[:, 0]
        return functional.binary_cross_entropy_with_logits(logits, clicked)


class TwoTower(nn.Module):
    """Two towers that meet in a batch softmax (Yi et al., RecSys 2019)."""

    def __init__(
        self, users: int = 10_000_000, items: int = 10_000_000, width: int = 256, hidden: int = 1024
    ) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_tower = perceptron((width, hidden, hidden, width))
        self.item_tower = perceptron((width, hidden, hidden, width))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        one = functional.normalize(self.user_tower(self.users(user)), dim=-1)
        other = functional.normalize(self.item_tower(self.items(item)), dim=-1)
        scores = one @ other.T / 0.05
        targets = torch.arange(scores.shape[0], device=scores.device)
        return functional.cross_entropy(scores, targets)


def pairs(batch: int) -> Inputs:
    """Pairs of users and items."""
    return {"user": torch.randint(0, 16, (batch,)), "item": torch.randint(0, 16, (batch,))}


class Recurrent(nn.Module):
    """A language model of LSTM layers (arXiv:1409.2329, large)."""

    def __init__(self, vocabulary: int = 10_000, width: int = 1500, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(input_ids))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class GraphNetwork(nn.Module):
    """GraphSAGE with mean aggregation (arXiv:1706.02216) over edges that are data."""

    def __init__(
        self, features: int = 100, hidden: int = 256, classes: int = 47, layers: int = 3
    ) -> None:
        super().__init__()
        widths = [features, *[hidden] * (layers - 1), classes]
        steps = list(pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in steps)
        self.others = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in steps)

    def forward(
        self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        ones = x.new_ones(source.shape[0])
        degree = x.new_zeros(x.shape[0]).index_add(0, target, ones).clamp(min=1)
        for i, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            mixed = torch.zeros_like(x).index_add(0, target, x[source]) / degree[:, None]
            x = own(x) + others(mixed)
            if i < len(self.own) - 1:
                x = functional.relu(x)
        return functional.cross_entropy(x, labels)


def edges(nodes: int, degree: int, features: int, classes: int) -> Inputs:
    """A graph whose nodes have features and a class each."""
    return {
        "x": torch.randn(nodes, features),
        "source": torch.randint(0, nodes, (nodes * degree,)),
        "target": torch.randint(0, nodes, (nodes * degree,)),
        "labels": torch.randint(0, classes, (nodes,)),
    }


class PointNetwork(nn.Module):
    """PointNet (arXiv:1612.00593) without its alignment nets: points, then their maximum."""

    def __init__(
        self, widths: tuple[int, ...] = (64, 64, 64, 128, 1024), classes: int = 40
    ) -> None:
        super().__init__()
        sizes = (3, *widths)
        self.points = nn.Sequential(
            *(
                nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())
                for a, b in zip(sizes, widths, strict=False)
            )
        )
        self.head = perceptron((widths[-1], widths[-1] // 2, widths[-1] // 4, classes))

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        most = self.points(points).amax(dim=2)
        return functional.cross_entropy(self.head(most), labels)


def clouds(batch: int, points: int, classes: int) -> Inputs:
    """Clouds of points with a class each."""
    return {
        "points": torch.randn(batch, 3, points),
        "labels": torch.randint(0, classes, (batch,)),
    }
