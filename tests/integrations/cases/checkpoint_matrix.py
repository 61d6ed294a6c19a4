"""Each way to save x each kind of model: saved on a mesh of 4, resumed on one of 2x2.

Pipelines are in `runtime.cases.pipeline_states`, the Trainer in `trained` (tied, interleaved,
compiled) and `adapters`.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, inject_adapter_in_model
from runtime.cases.checkpoint_habits import INTERLEAVED
from runtime.cases.habits import SHARDED, Habit, Net, Pins, adam, assert_same, batches, step
from runtime.cases.model_habits import TIED, Tied
from support.processes import launched_process
from support.shared_folder import shared_folder
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from autoshard.checkpoint import load_checkpoint, save_checkpoint
from autoshard.integrations.accelerate import PlannedAccelerator
from autoshard.integrations.checkpoints import load_optimizers, save_optimizers
from autoshard.runtime import dcp_state_dict, full_tensor

Optimizer = torch.optim.Optimizer
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Distributed:
    """`torch.distributed.checkpoint`."""

    def save(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        dcp.save(dcp_state_dict(self._state(model, optimizer), model), checkpoint_id=folder)

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        state = self._state(model, optimizer)
        dcp.load(dcp_state_dict(state, model), checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        found = get_state_dict(model, optimizer)
        return dict(zip(("model", "optimizer"), found, strict=True))


class Safetensors:
    """Files of weights, and the optimizer beside them."""

    def save(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        save_checkpoint(model, folder)
        save_optimizers(model, [optimizer], Path(folder, "optimizer"))

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        load_checkpoint(model, folder)
        load_optimizers(model, [optimizer], Path(folder, "optimizer"))


class Pickled:
    """`torch.save` of full tensors, by the first rank."""

    def save(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        states = full_tensor([model.state_dict(), get_optimizer_state_dict(model, optimizer)])
        if not dist.get_rank():
            torch.save(states, f"{folder}/state.pt")

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        of_model, of_optimizer = torch.load(f"{folder}/state.pt")
        model.load_state_dict(of_model)
        set_optimizer_state_dict(model, optimizer, of_optimizer, options=FULL)


class Full:
    """Full state dicts of torch, which the first rank has and the others receive."""

    def save(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        states = get_state_dict(model, optimizer, options=FULL)
        if not dist.get_rank():
            torch.save(states, f"{folder}/state.pt")

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        of_model, of_optimizer = ({}, {}) if dist.get_rank() else torch.load(f"{folder}/state.pt")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, of_model, options=options)
        set_optimizer_state_dict(model, optimizer, of_optimizer, options=options)


class Accelerate:
    """`save_state` and `load_state` of accelerate."""

    def save(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self._prepared(model, optimizer).save_state(f"{folder}/state")

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self._prepared(model, optimizer).load_state(f"{folder}/state")

    def _prepared(self, model: nn.Module, optimizer: Optimizer) -> PlannedAccelerator:
        accelerator = PlannedAccelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        return accelerator


WAYS = (Distributed(), Safetensors(), Pickled(), Full(), Accelerate())


def with_adapters() -> nn.Module:
    """LoRA of two weights; the others are frozen."""
    config = LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    made: nn.Module = inject_adapter_in_model(config, Net())
    return made


ADAPTED: Mapping[str, Pins] = {
    "4": {"inputs": {"*": "S(0)"}, "parameters": {"*lora_A*": "S(0)", "*base*weight": "S(0)"}},
    "2x2": {"inputs": {"*": "S(0),R"}, "parameters": {"*lora*": "I,S(0)", "*base*": "S(0),I"}},
}


@dataclass
class Resumed:
    """A model that is trained on one mesh, saved, loaded on another one and trained on.

    Attributes:
        build: makes the model.
        pins: of its plans, by mesh.
        compiles: True to train the planned models compiled.
    """

    build: Callable[[], nn.Module] = Net
    pins: Mapping[str, Pins] = field(default_factory=lambda: SHARDED)
    compiles: bool = False

    def prepare(self) -> None:
        for mesh in ("4", "2x2"):
            assert self._habit(mesh).plan.found

    def _habit(self, mesh: str) -> Habit:
        return Habit(mesh, lambda _: None, self.build, pins=self.pins)

    def __call__(self) -> None:
        # Of torch's state dicts, for parameters without gradients and for empty optimizers.
        warnings.filterwarnings("ignore", category=UserWarning)
        first, second, third = batches(3)
        saved, reference = self._habit("4").models()
        optimizers = [adam(saved), adam(reference)]
        for model, optimizer in zip((self.run(saved), reference), optimizers, strict=True):
            for batch in (first, second):
                step(model, optimizer, batch)
        expected = step(reference, optimizers[1], third)
        for way in WAYS:
            with launched_process(), shared_folder() as folder:
                way.save(saved, optimizers[0], folder)
                dist.barrier()
                resumed, _ = self._habit("2x2").models()
                with torch.no_grad():
                    for parameter in resumed.parameters():
                        parameter.zero_()
                optimizer = adam(resumed)
                way.load(resumed, optimizer, folder)
                dist.barrier()
            name = type(way).__name__
            assert_same(step(self.run(resumed), optimizer, third), expected, f"{name}: loss")
            assert_same(resumed.state_dict(), reference.state_dict(), f"{name}: state")

    def run(self, model: nn.Module) -> nn.Module:
        """The model that training calls."""
        return torch.compile(model, backend="aot_eager") if self.compiles else model


CASES: dict[str, Callable[[], None]] = {
    "plain": Resumed(),
    "tied": Resumed(Tied, TIED),
    "interleaved": Resumed(pins=INTERLEAVED),
    "compiled": Resumed(compiles=True),
    "LoRA": Resumed(with_adapters, ADAPTED),
}
