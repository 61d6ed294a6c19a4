"""The operators of mixtures of experts on whole tensors, spelt as an export has them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autoshard.graph.experts import groups_of_rows


def ordered(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    by_expert, order = torch.sort(ids.reshape(-1), stable=True)
    return by_expert, order


def grouped(rows: torch.Tensor, num_experts: int) -> torch.Tensor:
    return rows.reshape(*groups_of_rows(num_experts, len(rows)), -1)


def _dispatch(tokens: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    _, order = ordered(ids)
    return grouped(tokens[order // ids.shape[1]], num_experts)


def _grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    by_expert, _ = ordered(ids)
    flat = rows.reshape(len(by_expert), 1, -1) @ matrices[by_expert]
    return grouped(flat.squeeze(1), len(matrices))


def _expert_bias(bias: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    by_expert, _ = ordered(ids)
    return grouped(bias[by_expert], len(bias))


def _combine(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    _, order = ordered(ids)
    assert rows.shape[:2] == groups_of_rows(num_experts, len(order))
    flat = rows.reshape(len(order), -1) * weights.reshape(-1)[order].unsqueeze(1)
    return flat[torch.argsort(order)].view(*ids.shape, -1).sum(1)


_OPERATORS = {
    "dispatch(Tensor tokens, Tensor ids, int num_experts) -> Tensor": _dispatch,
    "grouped_mm(Tensor rows, Tensor matrices, Tensor ids) -> Tensor": _grouped_mm,
    "expert_bias(Tensor bias, Tensor ids) -> Tensor": _expert_bias,
    "combine(Tensor rows, Tensor ids, Tensor weights, int num_experts) -> Tensor": _combine,
}


@contextmanager
def registered() -> Iterator[None]:
    """A context in which torch knows the operators."""
    library = torch.library.Library("autoshard", "DEF")
    for schema, function in _OPERATORS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
    yield
    library._destroy()
