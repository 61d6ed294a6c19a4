"""Habits around checkpoints: state dicts in all ways, what is tied, hooks, averages, pruning."""

import io
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime.cases.habits import (
    FEATURES,
    SHARDED,
    Batch,
    Habit,
    Net,
    Pins,
    Refused,
    adam,
    batches,
    step,
    train,
)
from runtime.cases.model_habits import TIED, Tied
from runtime.cases.optimizer_habits import OPTIMIZERS
from runtime.cases.updated_buffers import MESHES
from support.comparison import whole
from support.shared_folder import shared_folder
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.optim import swa_utils

from autoshard.errors import CheckpointError, PlanError
from autoshard.runtime import load_checkpoint, save_checkpoint


def is_planned(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(tensor.detach()).clone() for name, tensor in model.state_dict().items()}


def tied_assigned(model: nn.Module, separate: bool) -> object:
    """Loaded with `assign=True`, tied weights stay tied, as where they are copied."""
    train(model, 2)
    state = model.state_dict()
    full = full_state(model) if separate else {n: x.detach().clone() for n, x in state.items()}
    if not separate:
        full["head.weight"] = full["embed.weight"]
    for tensor in full.values():
        tensor.mul_(0.5)
    if separate:
        pass
    model.load_state_dict(full, assign=is_planned(model))
    losses = train(model)
    assert model.head.weight is model.embed.weight
    return losses


def scale_of(model: nn.Module, name: str) -> object:
    torch.manual_seed(5)
    twin = Scaled().double()
    theirs = OPTIMIZERS[name](twin.parameters())
    for batch in batches(2):
        step(twin, theirs, batch)
    optimizer = OPTIMIZERS[name](model.parameters())
    model.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(deepcopy(theirs.state_dict()))
    return [step(model, optimizer, batch) for batch in batches(3)]


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return super().hidden(ids) * self.logit_scale.exp()


def buffered(model: nn.Module) -> object:
    found = []
    for options in (
        {"use_buffers": True},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.9), "use_buffers": True},
    ):
        average = swa_utils.AveragedModel(model, **options)
        optimizer = adam(model)
        for batch in batches(3):
            found.append(step(model, optimizer, batch))
            average.update_parameters(model)
        found.append(dict(average.module.state_dict()))
    return found


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.nn.functional.gelu(self.up(self.norm(x)))
        self.mean.lerp_(up.detach().mean((0, 1)), 0.1)
        self.calls += 1
        return self.down(up + self.mean)


def pruned(model: nn.Module) -> object:
    train(model, 1)
    prune.l1_unstructured(model.up, "weight", 0.3)
    prune.remove(model.up, "weight")
    losses = train(model)
    return losses


def pruned_kept(model: nn.Module) -> object:
    prune.l1_unstructured(model.up, "weight", 0.3)
    return train(model)


def global_pruned(model: nn.Module) -> object:
    prune.global_unstructured([(model.up, "weight"), (model.down, "weight")], prune.L1Unstructured, amount=0.3)
    for m in (model.up, model.down):
        prune.remove(m, "weight")
    return train(model)

def file_of_dtensors(model: nn.Module) -> object:
    with shared_folder() as folder:
        torch.save(model.state_dict(), f"{folder}/{dist.get_rank()}.pt")
        dist.barrier()
        load_checkpoint(model, f"{folder}/0.pt")


class Renamed(Net):
    """A state-dict hook renames a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)

def _rename(_m, state, prefix, _meta):
    state[prefix + "proj.weight"] = state.pop(prefix + "up.weight")

def _rename_back(_m, state, prefix, *_):
    if prefix + "proj.weight" in state:
        state[prefix + "up.weight"] = state.pop(prefix + "proj.weight")


class Extra(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = 3.0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state) -> None:
        self.count = float(state)


def saved_and_loaded(model: nn.Module) -> object:
    train(model, 1)
    from tempfile import TemporaryDirectory
    from contextlib import nullcontext
    with shared_folder() if is_planned(model) else TemporaryDirectory() as folder:
        save_checkpoint(model, folder)
        from safetensors.torch import load_file
        found = load_file(f"{folder}/model.safetensors")
        expected = full_state(model) 
        assert set(found) == set(model.state_dict()), set(model.state_dict()) ^ set(found)
        other = type(model).__mro__[2 if is_planned(model) else 0]().double()
        for p in model.parameters():
            with torch.no_grad(): p.zero_()
        load_checkpoint(model, folder)
    return train(model), found


def dcp_plain(model, asynchronous: bool = False):
    train(model, 1)
    if not is_planned(model):
        return model(**batches(1)[0])
    with shared_folder() as folder:
        state = {"model": model.state_dict()}
        if asynchronous:
            dcp.async_save(state, checkpoint_id=folder).result()
        else:
            dcp.save(state, checkpoint_id=folder)
        for p in model.parameters():
            with torch.no_grad(): p.zero_()
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    return model(**batches(1)[0])


INTERLEAVED: dict[str, Pins] = {
    "4": {"inputs": {"*": "S(0)"}, "parameters": {"up.weight": "S(0)/1+1", "down.weight": "S(1)/1+1"}},
    "2x2": {"inputs": {"*": "S(0),R"}, "parameters": {"up.weight": "I,S(0)/1+1", "head.weight": "S(0),S(0);1>0"}},
}

HABITS = {
    "tied, assigned": lambda mesh: Habit(mesh, partial(tied_assigned, separate=False), Tied, pins=TIED),
    "tied, assigned apart": lambda mesh: Habit(mesh, partial(tied_assigned, separate=True), Tied, pins=TIED),
    **{f"scale {n}": (lambda mesh, n=n: Habit(mesh, partial(scale_of, name=n), Scaled, tolerance=1e-8)) for n in OPTIMIZERS},
    "buffers in averages": lambda mesh: Habit(mesh, buffered, Buffered),
    "pruned": lambda mesh: Habit(mesh, pruned),
    "globally pruned": lambda mesh: Habit(mesh, global_pruned),
    "pruned, with hooks": lambda mesh: Habit(mesh, pruned_kept),
    "file of dtensors": lambda mesh: Refused(mesh, file_of_dtensors, match="x", error=CheckpointError),
    "renamed": lambda mesh: Habit(mesh, saved_and_loaded, Renamed),
    "extra": lambda mesh: Habit(mesh, saved_and_loaded, Extra),
    "dcp": lambda mesh: Habit(mesh, dcp_plain, pins=INTERLEAVED),
    "dcp async": lambda mesh: Habit(mesh, partial(dcp_plain, asynchronous=True), pins=INTERLEAVED),
}
CASES = {f"{name}, {mesh}": habit(mesh) for mesh in MESHES for name, habit in HABITS.items()}
