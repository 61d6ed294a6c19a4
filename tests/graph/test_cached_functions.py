"""Exports of models that call functions which keep their results, as of `functools.cache`."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import export_model, load_graph

SIZE = 4
X = torch.ones(2, SIZE)


@functools.cache
def table(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, device=device).float()


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as of transformers: the function that keeps results is a free variable."""
    kept = functools.lru_cache(maxsize=32)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return kept(*args)

    return wrapper


@keeping
def wrapped(size: int, device: torch.device) -> torch.Tensor:
    return table.__wrapped__(size, device)


def unit() -> float:
    return 2.0


@functools.cache
def factor() -> float:
    return unit()


class Net(nn.Module):
    """A layer that adds what a method makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def added(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + self.added(x)
        return found


class OfGlobal(Net):
    def added(self, x: torch.Tensor) -> torch.Tensor:
        return table(SIZE, x.device)


class OfDecorator(Net):
    def added(self, x: torch.Tensor) -> torch.Tensor:
        return wrapped(SIZE, x.device)  # type: ignore[no-any-return]


class OfMethod(Net):
    @functools.lru_cache  # noqa: B019  as users write it
    def table(self, device: torch.device) -> torch.Tensor:
        return torch.arange(SIZE, device=device) * self.layer.in_features

    def added(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.device)


class OfNumber(Net):
    def added(self, x: torch.Tensor) -> torch.Tensor:
        return x * factor()


class InTraining(Net):
    """Calls the function in one mode alone, in which it is run again after the export."""

    def added(self, x: torch.Tensor) -> torch.Tensor:
        return table(SIZE, x.device) if self.training else x


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    table.cache_clear()
    factor.cache_clear()


KINDS = (OfGlobal, OfDecorator, OfMethod, OfNumber, InTraining)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_two_exports_are_equal(kind: type[Net], is_training: bool) -> None:
    model = kind().train(is_training)
    first = export_model(model, (X,))
    assert export_model(model, (X,)) == first


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_computes_after_an_export_what_it_computed_before(kind: type[Net]) -> None:
    model = kind()
    expected = model(X)
    export_model(model, (X,))
    assert torch.equal(model(X), expected)
    on_meta = X.to("meta")
    assert type(model.to("meta")(on_meta)) is torch.Tensor


def test_the_code_of_the_functions_is_recorded_each_time() -> None:
    graphs = [load_graph(export_model(OfNumber(), (X,))) for _ in range(2)]
    for graph in graphs:
        assert graph.model is not None
        assert any("unit" in place for place in graph.model.state)


def test_results_from_before_are_kept_if_none_is_added() -> None:
    factor()
    export_model(OfNumber(), (X,))
    assert factor.cache_info().currsize == 1
