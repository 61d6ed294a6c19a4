"""A small model, and its weights in the kinds of checkpoints there are."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from autoshard.checkpoint import save_checkpoint
from autoshard.runtime import init_empty_weights


class Tied(nn.Module):
    """An embedding that is the head too, with buffers of both kinds."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(16.0), persistent=False)


def meta_model() -> Tied:
    with init_empty_weights():
        return Tied()


def saved(tmp_path: Path, **changed: torch.Tensor | None) -> Path:
    """A safetensors file of a model, some tensors of which are others or left out."""
    torch.manual_seed(1)
    state: dict[str, torch.Tensor | None] = {**Tied().state_dict(), "head.weight": None}
    state.update({name.replace("__", "."): tensor for name, tensor in changed.items()})
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({n: t for n, t in state.items() if t is not None}, path)
    return path


def sharded(tmp_path: Path) -> Path:
    """The index of a model in several files."""
    save_checkpoint(Tied(), tmp_path / "sharded", max_file_bytes=200)
    return tmp_path / "sharded" / "model.safetensors.index.json"


def check_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def as_file(folder: Path, model: nn.Module) -> Path:
    save_checkpoint(model, folder)
    return folder / "model.safetensors"


def as_folder(folder: Path, model: nn.Module) -> Path:
    save_checkpoint(model, folder, max_file_bytes=200)
    return folder


def as_torch_file(folder: Path, model: nn.Module) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def as_torch_index(folder: Path, model: nn.Module) -> Path:
    state = model.state_dict()
    places = {name: f"part{number % 2}.bin" for number, name in enumerate(state)}
    for file in set(places.values()):
        torch.save({n: t for n, t in state.items() if places[n] == file}, folder / file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


def as_dcp(folder: Path, model: nn.Module) -> Path:
    with pytest.warns(UserWarning, match=r"assuming the intent is to save in a single process"):
        dcp.save(model.state_dict(), checkpoint_id=folder)
    return folder


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
