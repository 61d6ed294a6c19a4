"""Many steps of training: unsharded, and under two plans one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints import state_of
from support.comparison import close, device_mesh, whole
from support.meshes import slow_devices
from support.models import Case as Built
from support.models import graph_of
from support.shared_folder import shared_folder
from torch import nn
from torch.utils.data import DataLoader

from autoshard.errors import PlanError
from autoshard.ops import draws_random_numbers
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import dcp_state_dict, parallelize, rng_step, shard_loader

STEPS = 8
SAVED_AFTER = 4
ROWS = 24
"""Three batches of eight: the order of rows is drawn three times, and saved within an epoch."""


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, as labels too."""

    def __init__(self, like: torch.Tensor, vocabulary: int) -> None:
        draw = torch.Generator().manual_seed(7)
        self._rows = torch.randint(vocabulary, (ROWS, like.shape[1]), generator=draw)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


@dataclass(frozen=True)
class Training:
    """Losses of a plan, and of another one that goes on from a checkpoint, as without plans.

    Attributes:
        build: a model with example inputs; `input_ids` are a batch of rows.
        plans: shape of the mesh and options of the plan that begins and the one that goes on.
    """

    build: Callable[[], Built]
    plans: tuple[tuple[dict[str, int], dict[str, Any]], ...]

    def prepare(self) -> None:
        assert all(plan.found for plan in self._made)
        assert len(self._expected) == STEPS

    @cached_property
    def _made(self) -> list[Plan]:
        graph = graph_of(self._built())
        return [
            make_plan(graph, slow_devices(**axes), PlanOptions(**options))
            for axes, options in self.plans
        ]

    @cached_property
    def _expected(self) -> list[float]:
        model, inputs = self._built()
        return _train(model, inputs, _loader(model, inputs), _optimizer(model), range(STEPS))

    def _built(self) -> Built:
        torch.manual_seed(0)
        return self.build()

    def __call__(self) -> None:
        first, second = self._made
        with shared_folder() as folder:
            losses = self._run(first, folder, range(SAVED_AFTER))
            losses += self._run(second, folder, range(SAVED_AFTER, STEPS))
        close(torch.tensor(losses), torch.tensor(self._expected), "losses")
        assert losses[-1] < losses[0]

    def _run(self, plan: Plan, folder: str, steps: range) -> list[float]:
        model, inputs = self._built()
        parallelize(model, plan, device_mesh(plan))
        optimizer = _optimizer(model)
        if steps.start:
            _step(model, optimizer, inputs)  # so that there is a state to load into
            dcp.load(dcp_state_dict(state_of(model, optimizer)), checkpoint_id=folder)
        loader = shard_loader(_loader(model, inputs), model, seed=5)
        losses = _train(model, inputs, loader, optimizer, steps)
        if steps.stop == SAVED_AFTER:
            dcp.save(dcp_state_dict(state_of(model, optimizer)), checkpoint_id=folder)
        return losses


@dataclass
class Resumed:
    """Losses with dropout, of a training that goes on under another plan as if nothing had been.

    Attributes:
        build: a model that drops, with inputs.
        options: of the plan that begins and the one that goes on; both cut what is dropped alike.
    """

    build: Callable[[], Built]
    options: tuple[dict[str, Any], dict[str, Any]]
    _plans: list[Plan] = field(default_factory=list)

    def prepare(self) -> None:
        graph = graph_of(self._built())
        self._plans = [
            make_plan(graph, slow_devices(dp=4), PlanOptions(**options)) for options in self.options
        ]
        drawing = {node.name for node in graph.nodes if draws_random_numbers(node)}
        cuts = [
            [p.outputs for p in plan.stages[0].nodes if p.name in drawing] for plan in self._plans
        ]
        assert cuts[0]
        assert cuts[0] == cuts[1]

    def _built(self) -> Built:
        torch.manual_seed(0)
        return self.build()

    def __call__(self) -> None:
        first, second = self._plans
        model, inputs, optimizer = self._start(first)
        losses = [_step(model, optimizer, inputs) for _ in range(6)]
        with shared_folder() as folder:
            model, inputs, optimizer = self._start(first)
            found = [_step(model, optimizer, inputs) for _ in range(3)]
            dcp.save(self._state(model, optimizer), checkpoint_id=folder)
            assert "steps" not in model.state_dict()
            model, inputs, optimizer = self._start(second)
            _step(model, optimizer, inputs)  # so that there is a state to load into
            dcp.load(self._state(model, optimizer), checkpoint_id=folder)
        assert rng_step(model).value == 3
        with torch.no_grad():
            rng_step(model).value = 0
            anew = float(whole(model(**inputs).loss))
            rng_step(model).value = 3
        found += [_step(model, optimizer, inputs) for _ in range(3)]
        close(torch.tensor(found), torch.tensor(losses), "losses")
        assert abs(anew - losses[3]) > 1e-3
        for wrong in (-1, 1.5, "3", None, torch.tensor([1, 2])):
            with pytest.raises(PlanError, match=r"cannot be .*; it must be a non-negative int"):
                rng_step(model).load_state_dict({"value": wrong})
        with pytest.raises(PlanError, match="cannot be None"):
            rng_step(model).load_state_dict({})
        with pytest.raises(PlanError, match="cannot be -1"):
            rng_step(model).value = -1
        assert rng_step(model).value == 6

    def _start(self, plan: Plan) -> tuple[nn.Module, dict[str, Any], torch.optim.Optimizer]:
        model, inputs = self._built()
        parallelize(model, plan, device_mesh(plan), seed=3)
        return model, inputs, _optimizer(model)

    def _state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return dcp_state_dict(state_of(model, optimizer) | {"steps": rng_step(model)})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def _loader(model: nn.Module, inputs: dict[str, Any]) -> DataLoader[dict[str, torch.Tensor]]:
    ids = inputs["input_ids"]
    texts = Texts(ids, model.config.vocab_size)
    order = torch.Generator().manual_seed(5)
    return DataLoader(texts, batch_size=len(ids), shuffle=True, generator=order)


def _train(
    model: nn.Module,
    inputs: dict[str, Any],
    loader: DataLoader[dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    steps: range,
) -> list[float]:
    """Losses of some steps; those before them are skipped."""
    losses, step = [], 0
    while step < steps.stop:
        for batch in loader:
            if step in steps:
                losses.append(_step(model, optimizer, inputs | batch))
            step += 1
            if step == steps.stop:
                break
    return losses


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> float:
    loss = model(**inputs).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(whole(loss.detach()))
