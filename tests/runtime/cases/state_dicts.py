"""State dicts of planned models as PyTorch's own functions save and load them."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.cases.updated_buffers import MESHES
from support.comparison import close, device_mesh
from support.meshes import slow_devices
from support.models import gpt2, graph_of
from support.shared_folder import shared_folder
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from autoshard.errors import CheckpointError
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import full_tensor, parallelize


@dataclass
class States:
    """Of GPT-2 with interleaved weights, and dims that two axes shard in either order.

    Attributes:
        axes: of the mesh.
    """

    axes: dict[str, int]
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        rest = ["S(0)"] * (len(self.axes) - 1)
        pins = {"parameters": {"*.c_attn.weight": ",".join(["S(1)/1+1+1", *rest])}}
        graph = graph_of(gpt2(batch=8))
        self.plan = make_plan(graph, slow_devices(**self.axes), PlanOptions(pins=pins))
        assert self.plan.found

    def __call__(self) -> None:
        torch.manual_seed(0)
        self.reference, self.batch = gpt2(batch=8)
        self.expected = _optimizer(self.reference)
        self.step(self.reference, self.expected)
        self.state = get_optimizer_state_dict(self.reference, self.expected)
        self.check_models()
        self.check_optimizers()
        self.check_files()

    def planned(self) -> nn.Module:
        """A model whose parameters are none of the reference's."""
        model = gpt2(batch=8)[0]
        return parallelize(model, self.plan, device_mesh(self.plan))

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(**self.batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def check_models(self) -> None:
        """Full tensors are loaded in every way, and saved."""
        full = self.reference.state_dict()
        on_first = full if dist.get_rank() == 0 else {}
        whole = StateDictOptions(full_state_dict=True)
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        loads: tuple[Callable[[nn.Module], Any], ...] = (
            lambda m: m.load_state_dict(full),
            lambda m: m.load_state_dict(deepcopy(full), assign=True),
            lambda m: m.transformer.load_state_dict(self.reference.transformer.state_dict()),
            lambda m: set_model_state_dict(m, dict(full), options=whole),
            lambda m: set_model_state_dict(m, dict(on_first), options=broadcast),
        )
        for load in loads:
            model = self.planned()
            load(model)
            _same(model, full)
        close(model(**self.batch).loss, self.reference(**self.batch).loss, "loss")
        for offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
            saved = get_model_state_dict(model, options=options)
            assert len(saved) == (len(full) if dist.get_rank() == 0 or not offload else 0)
            assert all(torch.equal(saved[name], full[name]) for name in saved)
        with pytest.raises(RuntimeError, match=r"size mismatch for transformer\.wte\.weight"):
            model.load_state_dict({**full, "transformer.wte.weight": torch.zeros(2, 2)})

    def check_optimizers(self) -> None:
        """The state of an unsharded optimizer is loaded, and got back."""
        on_first = self.state if dist.get_rank() == 0 else {}
        whole = StateDictOptions(full_state_dict=True)
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        loads: tuple[Callable[[nn.Module, torch.optim.Optimizer], Any], ...] = (
            lambda _, o: o.load_state_dict(deepcopy(self.expected.state_dict())),
            lambda m, o: set_optimizer_state_dict(m, o, deepcopy(self.state), options=whole),
            lambda m, o: set_optimizer_state_dict(m, o, deepcopy(on_first), options=broadcast),
        )
        reference = deepcopy(self.reference)
        expected = _optimizer(reference)
        expected.load_state_dict(deepcopy(self.expected.state_dict()))
        self.step(reference, expected)
        for load in loads:
            model = self.planned()
            model.load_state_dict(self.reference.state_dict())
            optimizer = _optimizer(model)
            load(model, optimizer)
            self.step(model, optimizer)
            for name, parameter in model.named_parameters():
                close(full_tensor(parameter.detach()), reference.get_parameter(name), name)
        saved = get_optimizer_state_dict(model, optimizer, options=whole)
        state = get_optimizer_state_dict(reference, expected)
        for name, values in saved["state"].items():
            close(values["exp_avg"], state["state"][name]["exp_avg"], name)

    def check_files(self) -> None:
        """A file per rank is loaded on another mesh object; that of one rank is refused."""
        model = self.planned()
        optimizer = _optimizer(model)
        self.step(model, optimizer)
        contents = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with shared_folder() as folder:
            torch.save(contents, Path(folder) / f"{dist.get_rank()}.pt")
            dist.barrier()
            own = torch.load(Path(folder) / f"{dist.get_rank()}.pt")
            first = torch.load(Path(folder) / f"{(dist.get_rank() + 1) % 4}.pt")
        again = self.planned()
        again.load_state_dict(own["model"])
        _same(again, {name: full_tensor(x) for name, x in model.state_dict().items()})
        resumed = _optimizer(again)
        resumed.load_state_dict(own["optimizer"])
        self.step(again, resumed)
        self.step(model, optimizer)
        _same(again, {name: full_tensor(x) for name, x in model.state_dict().items()})
        with pytest.raises(CheckpointError, match=r"the shard of the rank at .*save_checkpoint"):
            again.load_state_dict(first["model"])
        resumed.load_state_dict(first["optimizer"])
        with pytest.raises(CheckpointError, match=r"'exp_avg' of the state dict is the shard of"):
            self.step(again, resumed)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)


def _same(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(full_tensor(tensor), expected[name]), name


CASES: dict[str, Callable[[], None]] = {
    f"full tensors, {mesh}": States(axes) for mesh, axes in MESHES.items()
}
