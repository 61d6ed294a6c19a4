"""Weights, optimizers and norms of a model whose ranks hold different stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime.cases.pipelines import check_gradients, joined_batch, loss_of
from support.comparison import close, device_mesh, whole
from support.meshes import slow_devices
from support.models import Case, gpt2, graph_of
from support.shared_folder import shared_folder
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from autoshard.checkpoint import load_checkpoint, save_checkpoint
from autoshard.errors import CheckpointError, PlanError
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import dcp_state_dict, init_empty_weights, parallelize

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
TIED = "transformer.wte.weight"


@dataclass
class States:
    """Of GPT-2, whose embedding is held by the first and the last stage.

    Attributes:
        check: what is checked.
        axes: of the mesh.
        stages: number of stages.
    """

    check: Callable[["States"], None]
    axes: Mapping[str, int]
    stages: int
    plan: Plan = field(init=False)
    other: Plan = field(init=False)

    def prepare(self) -> None:
        graph = graph_of(self.built()[0])
        pins = {"inputs": {"input_ids": "S(0)", "labels": "S(0)"}}
        options = {"stages": self.stages, "micro_batches": 4, "pins": pins}
        self.plan = make_plan(graph, slow_devices(**self.axes), PlanOptions(**options))
        self.other = make_plan(graph, slow_devices(dp=4), PlanOptions())
        assert self.plan.found
        assert self.other.found

    def built(self) -> tuple[Case, list[dict[str, Any]]]:
        """The model, and the arguments of four micro-batches."""
        torch.manual_seed(0)
        model, inputs = gpt2(batch=4)
        return (model, inputs), [inputs, *(gpt2(batch=4)[1] for _ in range(3))]

    def planned(self, plan: Plan | None = None) -> nn.Module:
        """A model whose weights are not the reference's."""
        torch.manual_seed(1)
        plan = plan or self.plan
        return parallelize(gpt2(batch=4)[0], plan, device_mesh(plan))

    def __call__(self) -> None:
        (self.reference, _), self.parts = self.built()
        self.check(self)


def check_lazy_loading(case: States) -> None:
    """From the meta device, a rank reads and holds its own stages only."""
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            save_checkpoint(case.reference, Path(folder) / "whole")
        dist.barrier()
        with init_empty_weights():
            model = gpt2(batch=4)[0]
        planned = parallelize(model, case.plan, device_mesh(case.plan))
        report = load_checkpoint(planned, Path(folder) / "whole")
        own = dict(planned.named_parameters())
        assert report.num_tensors == len(own) < len(list(case.reference.parameters()))
        assert report.bytes_stored == sum(p.numel() * p.itemsize for p in own.values())
        names = {p.target for stage in planned for p in stage.forward_program.stage.parameters}
        assert {id(planned.get_parameter(name)) for name in names} == set(map(id, own.values()))
        assert not any(p.to_local().is_meta for p in own.values())
        losses = torch.stack([loss_of(case.reference(**part)) for part in case.parts])
        losses.mean().backward()
        close(planned.step(**joined_batch(case.parts)), losses.detach().mean().double(), "loss")
        check_gradients(planned, case.reference)
        save_checkpoint(planned, Path(folder) / "saved", max_file_bytes=20_000)
        unsharded = gpt2(batch=4)[0]
        load_checkpoint(unsharded, Path(folder) / "saved")
        for (name, one), other in zip(
            unsharded.named_parameters(), case.reference.parameters(), strict=True
        ):
            close(one.detach(), other.detach(), name, 0)


def check_state_dicts(case: States) -> None:
    """A state dict of the whole model is loaded; names are those of the model."""
    planned = case.planned()
    full = case.reference.state_dict()
    assert set(planned.state_dict()) < set(full)
    planned.load_state_dict(full)
    for name, tensor in planned.state_dict().items():
        close(whole(tensor), full[name], name, 0)


def check_full_states(case: States) -> None:
    """`full_state_dict` gives the tensors of all stages, and takes them."""
    full = case.reference.state_dict()
    first = dist.get_rank() == 0
    whole_states = StateDictOptions(full_state_dict=True)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for options, given in ((whole_states, dict(full)), (broadcast, dict(full) if first else {})):
        planned = case.planned()
        set_model_state_dict(planned, given, options=options)
        for offload in (False, True):
            found = get_model_state_dict(
                planned, options=StateDictOptions(full_state_dict=True, cpu_offload=offload)
            )
            assert list(found) == (list(full) if first or not offload else [])
            assert all(torch.equal(tensor, full[name]) for name, tensor in found.items())
    optimizer = torch.optim.AdamW(planned.parameters())
    with pytest.raises(CheckpointError, match=r"this rank's pipeline stages only: save"):
        get_optimizer_state_dict(planned, optimizer, options=whole_states)
    own = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    with pytest.raises(CheckpointError, match="leave out ignore_frozen_params"):
        get_model_state_dict(planned, options=own)


def check_resharding(case: States) -> None:
    """Training goes on from a checkpoint under a plan with other stages, or none, and back."""
    expected = unsharded_losses(case, 6)
    with shared_folder() as folder:
        first = Training(case, case.planned())
        first.model.load_state_dict(case.reference.state_dict())
        losses = [first.step() for _ in range(2)]
        first.save(f"{folder}/1")
        second = Training(case, case.planned(case.other))
        second.load(f"{folder}/1")
        losses += [second.step() for _ in range(2)]
        second.save(f"{folder}/2")
        third = Training(case, case.planned())
        third.load(f"{folder}/2")
        losses += [third.step() for _ in range(2)]
    close(torch.tensor(losses), torch.tensor(expected), "losses")
    assert losses[-1] < losses[0]


def unsharded_losses(case: States, steps: int) -> list[float]:
    """What the model on one device would give."""
    model = case.built()[0][0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = torch.stack([loss_of(model(**part)) for part in case.parts]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@dataclass
class Training:
    """A training loop of either kind of plan."""

    case: States
    model: nn.Module

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self) -> float:
        """One step of the whole batch; the loss."""
        if hasattr(self.model, "step"):
            loss = self.model.step(**joined_batch(self.case.parts))
            self.model.clip_grad_norm_(0.5)
        else:
            losses = [loss_of(self.model(**part)) / 4 for part in self.case.parts]
            for one in losses:
                one.backward()
            loss = torch.stack(losses).sum()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(whole(loss.detach()))

    def state(self) -> dict[str, Any]:
        """Of model and optimizer, by the model's names."""
        found = {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
        }
        return dcp_state_dict(found, self.model)

    def save(self, path: str) -> None:
        dcp.save(self.state(), checkpoint_id=path)

    def load(self, path: str) -> None:
        """Into a model that has made a step, so that there is a state to load into."""
        self.step()
        found = {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
        }
        dcp.load(dcp_state_dict(found, self.model), checkpoint_id=path)
        set_optimizer_state_dict(self.model, self.optimizer, found["optimizer"], options=FLAT)


def check_norms(case: States) -> None:
    """The norm is that of the whole model, with the tied embedding once; torch's is refused."""
    planned = case.planned()
    planned.load_state_dict(case.reference.state_dict())
    torch.stack([loss_of(case.reference(**part)) for part in case.parts]).mean().backward()
    for kind in (2.0, 1.0, float("inf")):
        planned.zero_grad()
        planned.step(**joined_batch(case.parts))
        with pytest.raises(PlanError, match=r"call model\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(planned.parameters(), 1.0)
        norm = planned.clip_grad_norm_(0.1, kind)
        reference = case.built()[0][0]
        for one, other in zip(reference.parameters(), case.reference.parameters(), strict=True):
            assert other.grad is not None
            one.grad = other.grad.clone()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, kind)
        close(norm, expected.double(), "norm")
        check_gradients(planned, reference)


def check_copies(case: States) -> None:
    """Copies of a tied parameter that differ are found before the first step."""
    planned = case.planned()
    if planned[0].is_last:
        with torch.no_grad():
            planned.get_parameter(TIED).to_local().add_(1)
        with pytest.raises(PlanError, match=r"the copies of parameter 'lm_head\.weight'"):
            planned.step(**joined_batch(case.parts))
    elif planned[0].is_first:
        with pytest.raises(PlanError, match="on stages"):
            planned.step(**joined_batch(case.parts))


PP2_DP2 = {"pp": 2, "dp": 2}
CASES = {
    "lazily loaded, pp2 dp2": States(check_lazy_loading, PP2_DP2, 2),
    "state dicts": States(check_state_dicts, PP2_DP2, 2),
    "full state dicts": States(check_full_states, PP2_DP2, 2),
    "full state dicts, several stages per rank": States(check_full_states, {"pp": 2, "dp": 2}, 4),
    "checkpoint resharded, pp2 dp2": States(check_resharding, PP2_DP2, 2),
    "checkpoint resharded, several stages per rank": States(check_resharding, {"pp": 4}, 4),
    "norms, pp2 dp2": States(check_norms, PP2_DP2, 2),
    "copies that differ": States(check_copies, PP2_DP2, 2),
}
