"""Habits around checkpoints: what is tied, renamed, averaged, pruned, interleaved, or one shard."""

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime.cases.habits import (
    Habit,
    Net,
    Pins,
    Refused,
    adam,
    assert_same,
    batches,
    is_planned,
    step,
    train,
)
from runtime.cases.model_habits import TIED, Tied
from runtime.cases.optimizer_habits import OPTIMIZERS
from runtime.cases.updated_buffers import MESHES
from safetensors.torch import load_file
from support.comparison import device_mesh, whole
from support.shared_folder import shared_folder
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn import functional
from torch.nn.utils import prune
from torch.optim import swa_utils

from autoshard.checkpoint import load_checkpoint, save_checkpoint
from autoshard.errors import CheckpointError
from autoshard.runtime import init_empty_weights, parallelize


def zeroed(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def tied_assigned(model: nn.Module, *, shares_memory: bool) -> object:
    """Loaded with `assign=True`, tied weights stay tied, as where they are copied."""
    train(model, 2)
    state = {n: whole(x.detach()).clone() * 0.5 for n, x in model.state_dict().items()}
    if shares_memory:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=is_planned(model))
    losses = train(model)
    assert model.head.weight is model.embed.weight
    return losses


def tied_assigned_shards(model: nn.Module) -> object:
    """Loaded from DTensors with `assign=True`, tied weights stay tied too."""
    state = deepcopy(model.state_dict())
    train(model, 1)
    model.load_state_dict(state, assign=is_planned(model))
    assert len(list(model.parameters())) == 7
    return train(model)


@dataclass
class Broadcast(Habit):
    """A tied model on the meta device that rank 0 fills, and that then trains."""

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = self.build().double()
        with init_empty_weights():
            planned = self.build().double()
        planned = parallelize(planned, self.plan, device_mesh(self.plan))
        state = dict(reference.state_dict()) if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch, where all is on meta
            set_model_state_dict(planned, state, options=options)
        assert_same(self.loop(planned), self.loop(reference), "losses")
        assert_same(planned.state_dict(), reference.state_dict(), "state")
        with shared_folder() as folder:
            save_checkpoint(planned, folder)
            saved = load_file(Path(folder, "model.safetensors"))
        assert_same(saved["embed.weight"], reference.get_parameter("embed.weight"), "saved")


class Scaled(Net):
    """Has a parameter without dims, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return super().hidden(ids) * self.logit_scale.exp()


def resumed_with(model: nn.Module, names: list[str]) -> object:
    """Goes on from the full state of optimizers of the unsharded model."""
    found = []
    for name in names:
        torch.manual_seed(5)
        twin = Scaled().double()
        theirs, own = (OPTIMIZERS[name](one.parameters()) for one in (twin, model))
        for batch in batches(2):
            step(twin, theirs, batch)
        model.load_state_dict(twin.state_dict())
        own.load_state_dict(deepcopy(theirs.state_dict()))
        found.append([step(model, own, batch) for batch in batches(3)])
    return found


class Buffered(Net):
    """Has buffers that forward updates."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        up = functional.gelu(self.up(self.norm(x)))
        self.mean.lerp_(up.detach().mean((0, 1)), 0.1)
        self.calls += 1
        return self.down(up + self.mean)


def averages_of_buffers(model: nn.Module) -> object:
    """Averages of weights and of buffers, of which some are sharded, kept in a state dict."""
    found = []
    for options in (
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
        {},
    ):
        average = swa_utils.AveragedModel(model, use_buffers=True, **options)
        optimizer = adam(model)
        for batch in batches(3):
            found.append(step(model, optimizer, batch))
            average.update_parameters(model)
            average.load_state_dict(deepcopy(average.state_dict()))
        found.append(dict(average.module.state_dict()))
    return found


def pruned(model: nn.Module) -> object:
    """Pruned for good, of one module and of several; an optimizer made before still has them."""
    train(model, 1)
    optimizer = adam(model)
    prune.l1_unstructured(model.up, "weight", 0.3)
    prune.remove(model.up, "weight")
    losses = [step(model, optimizer, batch) for batch in batches(2)]
    both = [(model.up, "weight"), (model.down, "weight")]
    prune.global_unstructured(both, prune.L1Unstructured, amount=0.3)
    for module, name in both:
        prune.remove(module, name)
    return losses, train(model)


def pruned_by_hooks(model: nn.Module) -> object:
    prune.l1_unstructured(model.up, "weight", 0.3)
    return train(model)


def loads_one_shard(model: nn.Module) -> object:
    """A file of DTensors, of which nothing is loaded."""
    if not is_planned(model):
        return None
    with shared_folder() as folder:
        torch.save({"model": model.state_dict()}, f"{folder}/{dist.get_rank()}.pt")
        dist.barrier()
        zeroed(model)
        try:
            load_checkpoint(model, f"{folder}/0.pt", rename=lambda name: "model." + name)
        finally:
            assert not any(p.to_local().any() for p in model.parameters())
            dist.barrier()
    return None


class Renamed(Net):
    """Hooks of its state dict rename a weight, and give another one as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(rename)
        self.register_load_state_dict_pre_hook(rename_back)


def rename(_: nn.Module, state: MutableMapping[str, Any], prefix: str, *__: object) -> None:
    state[f"{prefix}proj.weight"] = state.pop(f"{prefix}up.weight")
    state[f"{prefix}down.weight"] = state[f"{prefix}down.weight"].detach()


def rename_back(_: nn.Module, state: MutableMapping[str, Any], prefix: str, *__: object) -> None:
    if f"{prefix}proj.weight" in state:
        state[f"{prefix}up.weight"] = state.pop(f"{prefix}proj.weight")


class Extra(Net):
    """Has extra state, a tensor."""

    count = 3.0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.count])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = float(state)


class ExtraObject(Extra):
    """Has extra state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"count": self.count}


class Computed(Net):
    """A hook computes what its state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(negate)


def negate(_: nn.Module, state: MutableMapping[str, Any], prefix: str, *__: object) -> None:
    state[f"{prefix}up.weight"] = -state[f"{prefix}up.weight"]


def saved_and_loaded(model: nn.Module) -> object:
    """All that the state dict has is in the file, and is loaded from it."""
    train(model, 1)
    if not is_planned(model):
        return dict(deepcopy(model.state_dict())), train(model)
    with shared_folder() as folder:
        save_checkpoint(model, folder)
        dist.barrier()
        saved = load_file(Path(folder, "model.safetensors"))
        zeroed(model)
        if isinstance(model, Extra):
            model.count = 0.0
        load_checkpoint(model, folder)
        assert not isinstance(model, Extra) or model.count == 3.0
    return {name: saved[name] for name in model.state_dict()}, train(model)


def in_distributed_checkpoint(model: nn.Module) -> object:
    """Saved, also in the background, and loaded by torch alone."""
    train(model, 1)
    if is_planned(model):
        for save in (dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result()):
            with shared_folder() as folder:
                save({"model": model.state_dict()}, checkpoint_id=folder)
                zeroed(model)
                dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
                plain = {"model": deepcopy(Net().double().state_dict())}
                dcp.load(plain, checkpoint_id=folder)
                assert_same(model.state_dict(), plain["model"], "loaded whole")
                dist.barrier()
    return train(model)


INTERLEAVED: Mapping[str, Pins] = {
    "4": {
        "inputs": {"*": "S(0)"},
        "parameters": {"up.weight": "S(0)/1+1", "down.weight": "S(1)/1+1"},
    },
    "2x2": {
        "inputs": {"*": "S(0),R"},
        "parameters": {"up.weight": "I,S(0)/1+1", "head.weight": "S(0),S(0);1>0"},
    },
}
BUFFERS: Mapping[str, Pins] = {
    "4": {"inputs": {"*": "I"}, "parameters": {"up.*": "S(0)"}, "buffers": {"mean": "S(0)"}},
    "2x2": {"inputs": {"*": "S(0),R"}, "parameters": {"up.*": "I,S(0)"}},
}

HABITS: dict[str, Callable[[str], Habit]] = {
    "tied, assigned": lambda mesh: Habit(
        mesh, partial(tied_assigned, shares_memory=True), Tied, pins=TIED
    ),
    "tied, assigned apart": lambda mesh: Habit(
        mesh, partial(tied_assigned, shares_memory=False), Tied, pins=TIED
    ),
    "tied, assigned shards": lambda mesh: Habit(mesh, tied_assigned_shards, Tied, pins=TIED),
    "tied, broadcast": lambda mesh: Broadcast(mesh, train, Tied, pins=TIED),
    "a parameter without dims": lambda mesh: Habit(
        mesh, partial(resumed_with, names=[*OPTIMIZERS]), Scaled, tolerance=1e-8
    ),
    "averages of buffers": lambda mesh: Habit(mesh, averages_of_buffers, Buffered, pins=BUFFERS),
    "pruned": lambda mesh: Habit(mesh, pruned),
    "pruned by hooks": lambda mesh: Refused(
        mesh, pruned_by_hooks, match="hooks of 'up' do not run"
    ),
    "a file of one shard": lambda mesh: Refused(
        mesh, loads_one_shard, match="has the shard of one rank of", error=CheckpointError
    ),
    "renamed by hooks": lambda mesh: Habit(mesh, saved_and_loaded, Renamed),
    "extra state": lambda mesh: Habit(mesh, saved_and_loaded, Extra),
    "extra state of objects": lambda mesh: Refused(
        mesh,
        saved_and_loaded,
        ExtraObject,
        match="'_extra_state' of the state dict is a dict: return a tensor",
        error=CheckpointError,
    ),
    "computed by hooks": lambda mesh: Refused(
        mesh,
        saved_and_loaded,
        Computed,
        match=r"a hook computes 'up\.weight'",
        error=CheckpointError,
    ),
    "distributed checkpoints of interleaved shards": lambda mesh: Habit(
        mesh, in_distributed_checkpoint, pins=INTERLEAVED
    ),
}
CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": habit(mesh) for mesh in MESHES for name, habit in HABITS.items()
}
ON_2: dict[str, Callable[[], None]] = {f"{name}, 2": habit("2") for name, habit in HABITS.items()}
