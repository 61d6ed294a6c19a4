"""What ranks read of the batches of a loader."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.comparison import close, device_mesh, whole
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.export import Dim
from torch.utils.data import DataLoader, IterableDataset

from autoshard.errors import PlanError
from autoshard.graph import Graph, export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import full_tensor, parallelize, shard_loader
from autoshard.runtime.global_tensors.dtensors import local_tensor

ROWS = list(range(10))
TOKENS = ("input_ids", "labels")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)


@cache
def small_gpt2() -> Graph:
    return graph_of(models.gpt2(layers=1))


@cache
def plan_of(*inputs: tuple[str, str]) -> Plan:
    """A plan of a small GPT-2 for batches of four rows on 2x2 ranks."""
    options = PlanOptions(pins={"inputs": dict(inputs)})
    return make_plan(small_gpt2(), slow_devices(dp=2, tp=2), options)


def planned(inputs: dict[str, str], **settings: Any) -> nn.Module:
    """A small GPT-2 that runs as planned."""
    torch.manual_seed(0)
    model, _ = models.gpt2(layers=1)
    plan = plan_of(*inputs.items())
    return parallelize(model, plan, device_mesh(plan), **settings)


@dataclass(frozen=True)
class Read:
    """What ranks read under plans, which are made before there are ranks."""

    check: Callable[..., None]
    layouts: tuple[dict[str, str], ...]

    def prepare(self) -> None:
        for inputs in self.layouts:
            plan_of(*inputs.items())

    def __call__(self) -> None:
        self.check(*map(planned, self.layouts))


def read_by_all(loader: DataLoader[int]) -> list[list[list[int]]]:
    """The batches of one epoch, of each rank."""
    mine = [local_tensor(batch).tolist() for batch in loader]
    everyone: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return everyone


def check_shuffled_rows(model: nn.Module) -> None:
    """Ranks along dp read disjoint rows in one order, ranks along tp the same ones."""
    torch.manual_seed(dist.get_rank())  # as ranks that nobody has seeded alike
    loader = shard_loader(DataLoader(ROWS, batch_size=4, shuffle=True, drop_last=True), model)
    assert len(loader) == 2
    epochs = [read_by_all(loader) for _ in range(2)]
    for first, beside, second, behind in epochs:
        assert first == beside
        assert second == behind
        assert len({row for rank in (first, second) for batch in rank for row in batch}) == 8
    assert epochs[0] != epochs[1]


def check_rows_in_order(model: nn.Module) -> None:
    loader = DataLoader(ROWS, batch_sampler=[[0, 1, 2, 3], [9, 8, 7, 6]])
    assert read_by_all(shard_loader(loader, model)) == [
        [[0], [9]],
        [[1], [8]],
        [[2], [7]],
        [[3], [6]],
    ]


def check_inputs_that_differ(model: nn.Module) -> None:
    """One is cut and another is not, so all rows are read."""
    loader = shard_loader(DataLoader(ROWS[:4], batch_size=4), model)
    assert read_by_all(loader) == [[ROWS[:4]]] * 4


def check_further_dims_are_cut(cut: nn.Module, uncut: nn.Module) -> None:
    """Rows come from the loader, and forward takes this rank's part of each sequence."""
    _, inputs = models.gpt2(layers=1)
    ids = inputs["input_ids"]
    expected = uncut(**inputs).loss
    for batch in shard_loader(DataLoader(ids, batch_size=4), cut):
        assert isinstance(batch, DTensor)
        assert batch.shape == (4, 8)
        assert local_tensor(batch).shape == (2, 8)
        loss = cut(input_ids=batch, labels=batch, use_cache=False).loss
        torch.testing.assert_close(loss.cpu(), expected)


class Gathered:
    """Results come back whole, and their gradients reach the parameters.

    Args:
        pins: how the model and its output are cut on 2x2 ranks.
        batch: how many rows there are.
    """

    def __init__(self, pins: dict[str, dict[str, str]], batch: int = 16) -> None:
        self._options = PlanOptions(pins=pins)
        self._batch = batch
        self._plan: Plan | None = None

    def prepare(self) -> None:
        graph = graph_of(models.mlp(batch=self._batch))
        self._plan = make_plan(graph, slow_devices(a=2, b=2), self._options)
        assert self._plan.found, self._plan.reason

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = models.mlp(batch=self._batch)
        plain = copy.deepcopy(model)
        plan = self._plan
        assert plan is not None
        parallelize(model, plan, device_mesh(plan))
        whole_result = full_tensor({"made": model(**inputs)})["made"].cpu()
        assert not isinstance(whole_result, DTensor)
        expected = plain(**inputs)
        close(whole_result.detach(), expected.detach(), "result")
        cotangent = torch.randn_like(expected)
        expected.backward(cotangent)
        whole_result.backward(cotangent)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(full_tensor(one.grad), other.grad, f"gradient of {name}")


class OtherSizes:
    """A plan for batches of eight rows runs with others, on gradients as well."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def prepare(self) -> None:
        model, inputs = models.llama(layers=1, batch=8)
        shapes = {
            name: {0: Dim("batch", max=64), 1: Dim("sequence", max=16)} if name in TOKENS else None
            for name in inputs
        }
        graph = load_graph(export_model(model, (), inputs, dynamic_shapes=shapes))
        options = PlanOptions(pins={"inputs": {"*": "S(0),S(1)"}})
        self._plan = make_plan(graph, slow_devices(dp=2, tp=2), options)

    def __call__(self) -> None:
        assert self._plan is not None
        torch.manual_seed(0)
        model, _ = models.llama(layers=1, batch=8)
        plain = copy.deepcopy(model)
        parallelize(model, self._plan, device_mesh(self._plan), other_shapes="error")
        for shape in [(8, 8), (12, 8), (4, 16), (16, 4), (8, 8)]:
            ids = torch.randint(64, shape)
            losses = [
                run(input_ids=ids, labels=ids, use_cache=False).loss for run in (model, plain)
            ]
            close(whole(losses[0].detach()), losses[1].detach(), f"loss at {shape}")
            for loss in losses:
                loss.backward()
            for (name, one), other in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                close(one.grad.full_tensor(), other.grad, f"gradient of {name} at {shape}")
        for shape, message in [
            ((5, 8), "does not divide .*: leave the last"),
            ((128, 8), "was exported for 0 to 64, not 128"),
        ]:
            ids = torch.zeros(shape, dtype=torch.long)
            with pytest.raises(PlanError, match=message):
                model(input_ids=ids, labels=ids, use_cache=False)
        with pytest.raises(PlanError, match="dim 0 of argument 'labels' is 6, but other"):
            model(
                input_ids=torch.zeros(12, 8, dtype=torch.long),
                labels=torch.zeros(6, 8, dtype=torch.long),
                use_cache=False,
            )


def check_refusals(model: nn.Module) -> None:
    with pytest.raises(PlanError, match="GPT2LMHeadModel does not run as planned"):
        shard_loader(DataLoader(ROWS, batch_size=4), models.gpt2()[0])
    with pytest.raises(PlanError, match="cannot be indexed"):
        shard_loader(DataLoader(Stream(), batch_size=4), model)
    with pytest.raises(PlanError, match="single rows"):
        shard_loader(DataLoader(ROWS, batch_size=None), model)
    *_, last = read_by_all(shard_loader(DataLoader(ROWS, batch_size=4), model))[0]
    assert last == [8, 9]  # runs unsharded
    strict = planned({"*": "S(0),R"}, other_shapes="error")
    with pytest.raises(PlanError, match="has 2 rows; the plan is for 4"):
        list(shard_loader(DataLoader(ROWS, batch_size=4), strict))


CASES: dict[str, Callable[[], None]] = {
    "shuffled rows": Read(check_shuffled_rows, ({"*": "S(0),R"},)),
    "rows in order": Read(check_rows_in_order, ({"*": "S(0),S(0)"},)),
    "inputs that differ": Read(
        check_inputs_that_differ, ({"input_ids": "S(0),R", "labels": "R,R"},)
    ),
    "further dims are cut": Read(check_further_dims_are_cut, ({"*": "S(0),S(1)"}, {"*": "R,R"})),
    "rows are gathered": Gathered({"outputs": {"*": "S(0),R"}}),
    "both dims are gathered": Gathered({"outputs": {"*": "S(0),S(1)"}}),
    "nested cuts are gathered": Gathered({"outputs": {"*": "S(1),S(1);1>0"}}),
    "reversed weights are gathered": Gathered({"parameters": {"*.weight": "S(0),S(0);1>0"}}),
    "uneven rows are gathered": Gathered({"outputs": {"*": "R,S(0)"}}, batch=15),
    "other sizes": OtherSizes(),
    "what is refused": Read(check_refusals, ({"*": "S(0),R"},)),
}
