"""Several plans for one model: training, evaluation and decoding over the same parameters."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from runtime.cases.updated_buffers import FEATURES, LENGTH, MESHES, Averaged, Decoder, tokens
from support.comparison import close, device_mesh, whole
from support.devices import DEVICE
from support.meshes import slow_devices
from support.models import Case, gpt2, graph_of
from torch import nn

from autoshard.errors import PlanError
from autoshard.graph import graph_from_json
from autoshard.layouts import Layout
from autoshard.plan import Pins, Plan, PlanOptions, Stage
from autoshard.planner import make_plan, make_plans
from autoshard.runtime import parallelize, rng_step
from autoshard.runtime.parallelize import planned_forward
from autoshard.runtime.program.random_numbers import dropout_factors
from autoshard.runtime.shards import local_shard

STEPS = 20


@dataclass
class Programs:
    """Plans that store parameters alike, applied to one model.

    Attributes:
        axes: of the mesh.
        build: makes the model.
        calls: by name of the plan, its mode and what the model is called with.
        check: takes the planned model, the same model on one device, and the calls.
        together: True to optimize the plans together; otherwise the first one decides.
    """

    axes: dict[str, int]
    build: Callable[[], nn.Module]
    calls: Callable[[], Mapping[str, tuple[str, dict[str, Any]]]]
    check: Callable[[nn.Module, nn.Module, Mapping[str, dict[str, Any]]], None]
    together: bool = False
    plans: dict[str, Plan] = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        self.plans = {}
        mesh, programs = slow_devices(**self.axes), {}
        for name, (mode, arguments) in self.calls().items():
            model = self.build().train(mode == "training")
            programs[name] = graph_of((model, arguments)), PlanOptions(mode=mode)
        if self.together:
            self.plans = dict(make_plans(programs, mesh, weights={"train": 10}).plans)
        else:
            for name, (graph, options) in programs.items():
                pins = next(iter(self.plans.values())).state_pins() if self.plans else Pins()
                pinned = options.with_values(pins=pins)
                self.plans[name] = make_plan(graph, mesh, pinned)
        for plan in self.plans.values():
            assert plan.found
            assert plan.collectives
        layouts = {i.layout for i in next(iter(self.plans.values())).stages[0].parameters}
        assert any("S" in layout for layout in layouts)

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = self.build()
        mesh = device_mesh(next(iter(self.plans.values())))
        planned = parallelize(deepcopy(reference), self.plans, mesh)
        self.check(planned, reference, {name: call for name, (_, call) in self.calls().items()})


def without_dropout() -> nn.Module:
    return gpt2(dropout=0.0)[0]


def train_and_evaluate() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """A batch for training, and a smaller one for evaluation."""
    torch.manual_seed(1)
    batches: dict[str, Case] = {"train": gpt2(batch=8), "eval": gpt2(batch=4)}
    modes = {"train": "training", "eval": "inference"}
    return {name: (modes[name], kwargs) for name, (_, kwargs) in batches.items()}


def check_training_with_evaluation(
    planned: nn.Module, reference: nn.Module, calls: Mapping[str, dict[str, Any]]
) -> None:
    """A loop with an evaluation every 10 steps has the losses of the unsharded loop."""
    losses: list[list[float]] = []
    for model in (planned, reference):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(STEPS):
            model.train()
            loss = whole(model(**calls["train"])["loss"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    found.append(whole(model(**calls["eval"])["loss"]).item())
        losses.append(found)
    close(torch.tensor(losses[0]), torch.tensor(losses[1]), "losses", 1e-4)
    assert losses[0][-2] < losses[0][0]


def check_dropout(
    planned: nn.Module, reference: nn.Module, calls: Mapping[str, dict[str, Any]]
) -> None:
    """Dropout acts in training only; evaluation is that of the unsharded model, of any batch."""
    for _ in range(2):
        planned.train()
        first, second = (planned(**calls["train"])["loss"].item() for _ in range(2))
        assert first != second
        planned.eval()
        reference.eval()
        with torch.no_grad():
            found, expected = (model(**calls["eval"])["loss"] for model in (planned, reference))
        close(whole(found), expected, "loss of evaluation")
    assert rng_step(planned).value == 6
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match=r"no plan is for this call: train: .*; eval: .*shape"),
    ):
        found, expected = (model(**calls["train"])["loss"] for model in (planned, reference))
    close(whole(found), expected, "loss of a larger batch")
    wrong = calls["eval"] | {"use_cache": True}
    with pytest.raises(PlanError, match=r"no plan is for this call: train: .*; eval: .*True now"):
        planned(**wrong)


class Dropped(nn.Module):
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 64), nn.Linear(64, FEATURES)
        self.first, self.second = nn.Dropout(0.3), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(torch.relu(self.up(x)))
        return {"loss": (x - self.second(self.down(hidden))).square().mean()}


def dropped() -> Mapping[str, tuple[str, dict[str, Any]]]:
    torch.manual_seed(1)
    return {
        "train": ("training", {"x": torch.randn(32, FEATURES)}),
        "eval": ("inference", {"x": torch.randn(16, FEATURES)}),
    }


class PlannedMask(nn.Module):
    """Dropout with the masks that all ranks of a plan draw together, on one device.

    Args:
        stage: of the plan for training.
        number: of the dropout in the program.
        probability: of a zero.
    """

    def __init__(self, stage: Stage, number: int, probability: float) -> None:
        super().__init__()
        graph = graph_from_json(stage.program)
        nodes = [node for node in graph.nodes if node.operator == "aten.dropout.default"]
        self._name = nodes[number].name
        (placed,) = (placed for placed in stage.nodes if placed.name == self._name)
        self._layout = Layout.parse(placed.outputs[0])
        assert any(kind.is_shard for kind in self._layout.types)
        self._sizes = tuple(size for _, size in stage.axes)
        self._probability = probability
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Evaluation is a step of the planned model as well.
        step, self.step = self.step, self.step + 1
        if not self.training:
            return x
        mask = torch.full(x.shape, torch.nan, device=DEVICE)  # random numbers depend on it
        for coordinate in product(*map(range, self._sizes)):
            shard = local_shard(mask, self._layout, self._sizes, coordinate)
            axes = zip(self._layout.types, self._sizes, coordinate, strict=True)
            numbers = (str(number) for kind, size, number in axes if kind.is_shard and size > 1)
            shard.copy_(
                dropout_factors(
                    torch.tensor(step),
                    shard.shape,
                    dtype=x.dtype,
                    device=mask.device,
                    probability=self._probability,
                    seed=0,
                    identity="/".join((self._name, *numbers)),
                )
            )
        return x * mask.to(x.device)


def check_dropout_masks(
    planned: nn.Module, reference: nn.Module, calls: Mapping[str, dict[str, Any]]
) -> None:
    """With the masks of the plan, the unsharded loop has the same losses."""
    stage = planned_forward(planned).stage
    reference.first, reference.second = PlannedMask(stage, 0, 0.3), PlannedMask(stage, 1, 0.1)
    check_training_with_evaluation(planned, reference, calls)


def averaged() -> Mapping[str, tuple[str, dict[str, Any]]]:
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1))
    return {"train": ("training", {"x": x}), "eval": ("inference", {"x": x})}


class Frozen(Averaged):
    """Updates its buffers in training only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return super().forward(x)
        hidden = self.up(x) * self.scale - self.mean
        return (hidden @ self.codes.T).square().mean()


def check_shared_buffers(
    planned: nn.Module, reference: nn.Module, calls: Mapping[str, dict[str, Any]]
) -> None:
    """Evaluation reads the buffers that training updated, in the layout of training."""
    for _ in range(3):
        for name, training in (("train", True), ("eval", False)):
            found, expected = (
                model.train(training)(**calls[name]) for model in (planned, reference)
            )
            close(whole(found.detach()), expected.detach(), name)


def prompts() -> Mapping[str, tuple[str, dict[str, Any]]]:
    x = torch.randn(2, 8, FEATURES, generator=torch.Generator().manual_seed(2))
    return {
        "prefill": ("inference", {"x": x, "at": torch.arange(8)}),
        "decode": ("inference", tokens(1)[0]),
    }


class Prompted(Decoder):
    """Takes a prompt of several tokens, or one."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(LENGTH) <= at[:, None])[None, None]
        for layer in self.layers:
            x = x + layer(x, at, mask)
        return self.head(x)


def check_decoding(
    planned: nn.Module, reference: nn.Module, calls: Mapping[str, dict[str, Any]]
) -> None:
    """A prompt at once, then token by token, over one sharded cache."""
    planned.eval()
    reference.eval()
    with torch.no_grad():
        for arguments in (calls["prefill"], *tokens()[8:]):
            close(whole(planned(**arguments)), reference(**arguments), "logits")


CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": case
    for mesh, axes in MESHES.items()
    for name, case in {
        "training with evaluation": Programs(
            axes, without_dropout, train_and_evaluate, check_training_with_evaluation
        ),
        "planned together": Programs(
            axes,
            without_dropout,
            train_and_evaluate,
            check_training_with_evaluation,
            together=True,
        ),
        "dropout": Programs(axes, lambda: gpt2(dropout=0.2)[0], train_and_evaluate, check_dropout),
        "dropout masks": Programs(axes, Dropped, dropped, check_dropout_masks),
        "buffers": Programs(axes, Frozen, averaged, check_shared_buffers),
        "decoding": Programs(axes, Prompted, prompts, check_decoding),
    }.items()
}
LONG = tuple(f"planned together, {mesh}" for mesh in MESHES)
"""Plans that are optimized together store parameters alike, as the others do."""
