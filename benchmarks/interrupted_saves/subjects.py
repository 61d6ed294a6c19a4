"""Planned models that save and load; all their numbers follow from that of a checkpoint."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from autoshard import (
    Plan,
    PlanOptions,
    export_model,
    load_checkpoint,
    load_graph,
    make_mesh,
    make_plan,
    parallelize,
    rng_step,
    save_checkpoint,
)
from autoshard.integrations.accelerate import PlannedAccelerator
from autoshard.integrations.checkpoints import load_optimizers, replace_weights, save_optimizers
from autoshard.integrations.transformers import PlannedTrainer

NUM_RANKS = 2
FORMER, NEW, NEXT = 1, 2, 3
"""Numbers of checkpoints; all numbers in a checkpoint follow from its number."""


class Net(nn.Module):
    """A small model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.down(torch.relu(self.up(x))).square().mean()


@cache
def plan() -> Plan:
    """A plan that shards the model over the ranks."""
    graph = load_graph(export_model(Net(), (torch.ones(4, 8),)))
    pins = {"parameters": {"up.*": "S(0)", "down.weight": "S(1)", "down.bias": "I"}}
    made = make_plan(graph, make_mesh((NUM_RANKS,)), PlanOptions(pins=pins))
    assert made.found, made.reason
    return made


class Training:
    """A planned model with an optimizer, whose state is that of a checkpoint with a number."""

    def __init__(self) -> None:
        mesh = plan().mesh
        devices = init_device_mesh(
            "cpu", tuple(mesh.axis_sizes), mesh_dim_names=tuple(mesh.axis_names)
        )
        self.model = parallelize(Net(), plan(), devices)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.model(torch.ones(4, 8)).backward()
        self.optimizer.step()  # makes the state
        self.optimizer.zero_grad()

    @torch.no_grad()
    def become(self, number: int) -> None:
        """Set all numbers."""
        for parameter in self.model.parameters():
            parameter.fill_(float(number))
            state = self.optimizer.state[parameter]
            for value in state.values():
                value.fill_(float(number))
        rng_step(self.model).value = number
        self.optimizer.param_groups[0]["lr"] = float(number)

    def weights(self) -> set[float]:
        """The numbers of this rank's shards."""
        return {n for p in self.model.parameters() for n in _numbers(p)}

    def numbers(self) -> set[float]:
        """The numbers of weights, optimizer and step on this rank."""
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        found = {n for state in states for value in state.values() for n in _numbers(value)}
        rate = self.optimizer.param_groups[0]["lr"]
        return self.weights() | found | {float(rate), float(rng_step(self.model).value)}

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        raise NotImplementedError

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers."""
        raise NotImplementedError


def _numbers(tensor: torch.Tensor) -> list[float]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return [float(n) for n in local.detach().flatten().unique()]


class Weights(Training):
    """`replace_weights` and `load_checkpoint`: one file over one, or several over several.

    Args:
        sizes: maximum bytes of a file, of the former checkpoint and of others.
    """

    def __init__(self, former: int, others: int) -> None:
        super().__init__()
        self._sizes = {FORMER: former}, others

    def become(self, number: int) -> None:
        """Set all numbers."""
        super().become(number)
        self._number = number

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        known, others = self._sizes
        size = known.get(self._number, others)
        replace_weights(self.model, folder, max_file_bytes=size)

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers."""
        load_checkpoint(self.model, folder)
        return self.weights()


class NewWeights(Training):
    """`save_checkpoint` into a folder that has none."""

    def save(self, folder: Path) -> None:
        """Save where nothing is."""
        save_checkpoint(self.model, folder / "new", max_file_bytes=500)

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers; those of the former checkpoint if there is none."""
        if not [*folder.glob("new/*.index.json")]:
            return {float(FORMER)}
        load_checkpoint(self.model, folder / "new")
        return self.weights()


class Optimizers(Training):
    """`save_optimizers` and `load_optimizers`."""

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        save_optimizers(self.model, [self.optimizer], folder)

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers of the optimizer."""
        number = self.weights()
        load_optimizers(self.model, [self.optimizer], folder)
        return self.numbers() - number


def forget_accelerate() -> None:
    """Reset what accelerate keeps in a process; it has no public way."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    GradientState._reset_state()  # noqa: SLF001


class Accelerated(Training):
    """`PlannedAccelerator.save_state` and `load_state`."""

    def __init__(self) -> None:
        super().__init__()
        forget_accelerate()
        self._accelerator: Accelerator = PlannedAccelerator()
        self._scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        self._accelerator.prepare(self.model, self.optimizer, self._scheduler)

    def become(self, number: int) -> None:
        """Set all numbers."""
        super().become(number)
        self._scheduler.last_epoch = number

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        self._accelerator.save_state(str(folder))

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers."""
        self._accelerator.load_state(str(folder))
        return self.numbers() | {float(self._scheduler.last_epoch)}


class Trained(Training):
    """A checkpoint of `PlannedTrainer` that is saved again."""

    def __init__(self) -> None:
        super().__init__()
        forget_accelerate()

    def _trainer(self, folder: Path) -> Any:
        arguments = TrainingArguments(str(folder), report_to="none", use_cpu=True)
        scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        trainer: Any = PlannedTrainer(self.model, arguments, optimizers=(self.optimizer, scheduler))
        trainer.optimizer = trainer.accelerator.prepare(self.optimizer)
        trainer.state.global_step = 7
        return trainer

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        self._trainer(folder)._save_checkpoint(self.model, None)  # noqa: SLF001  of a step

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers."""
        trainer = self._trainer(folder)
        trainer.settle_saves()
        place = str(folder / "checkpoint-7")
        trainer._load_from_checkpoint(place)  # noqa: SLF001  as when it is resumed
        trainer._load_optimizer_and_scheduler(place)  # noqa: SLF001
        return self.numbers()


SUBJECTS: Mapping[str, Callable[[], Training]] = {
    "save_state": Accelerated,
    "Trainer": Trained,
    "replace_weights, one file": lambda: Weights(10_000, 10_000),
    "replace_weights, several files": lambda: Weights(500, 500),
    "replace_weights, one file by several": lambda: Weights(10_000, 500),
    "replace_weights, several files by one": lambda: Weights(500, 10_000),
    "save_optimizers": Optimizers,
    "save_checkpoint": NewWeights,
}
