"""`PlannedAccelerator`: the numbers of `Accelerator` in one process."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from support.comparison import close, device_mesh
from support.language_models import BATCH, MESHES, Texts, language_model, plans_of
from support.processes import launched_process
from support.shared_folder import shared_folder
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from autoshard.errors import CheckpointError, PlanError
from autoshard.integrations.accelerate import PlannedAccelerator
from autoshard.runtime import full_tensor, parallelize

STEPS = 20
SAVED_AFTER = 10
ACCUMULATED = 2


@dataclass
class Loop:
    """A training loop with accelerate.

    Attributes:
        accelerator: not used before.
        model: on one device, or planned.
    """

    accelerator: Accelerator
    model: nn.Module
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        loader = DataLoader(Texts(4 * BATCH), BATCH, shuffle=True, drop_last=True)
        prepared = self.accelerator.prepare(self.model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared

    def run(self, steps: range, folder: str | None = None) -> None:
        """Run some steps of the training, and save the state after some of them."""
        torch.manual_seed(11)
        number = 0
        while number < steps.stop * ACCUMULATED:
            for batch in self.loader:
                if number // ACCUMULATED in steps:
                    self.step(batch)
                number += 1
                if folder is not None and number == SAVED_AFTER * ACCUMULATED:
                    self.accelerator.save_state(folder)
                if number == steps.stop * ACCUMULATED:
                    break

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.losses.append(float(norm))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses += [loss.item(), self.scheduler.get_last_lr()[0]]

    def parameters(self) -> dict[str, torch.Tensor]:
        return {
            name: full_tensor(parameter.detach()).clone()
            for name, parameter in self.model.named_parameters()
        }


@dataclass
class Accelerated:
    """Trained as in one process; then resumed on the other mesh."""

    mesh: str
    _expected: Loop = field(init=False)

    def prepare(self) -> None:
        for mesh in MESHES:
            plans_of(mesh, counts=False)
        with launched_process():
            accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
            self._expected = Loop(accelerator, language_model())
            self._expected.run(range(STEPS))
            self._losses = torch.tensor(self._expected.losses)
            self._parameters = self._expected.parameters()

    def __call__(self) -> None:
        with launched_process(), shared_folder() as folder:
            loop = self.loop(self.mesh)
            loop.run(range(STEPS), folder)
            self.check(loop, self._losses)
            self.check_results(loop)
            self.check_saved(loop, f"{folder}/saved")
            (other,) = set(MESHES) - {self.mesh}
            resumed = self.loop(other)
            resumed.accelerator.load_state(folder)
            resumed.run(range(SAVED_AFTER, STEPS))
            self.check(resumed, self._losses[len(self._losses) // 2 :])

    def loop(self, mesh: str) -> Loop:
        plans = plans_of(mesh, counts=False)
        model = parallelize(language_model(), plans, device_mesh(plans["train"]))
        return Loop(PlannedAccelerator(gradient_accumulation_steps=ACCUMULATED), model)

    def check(self, loop: Loop, losses: torch.Tensor) -> None:
        close(torch.tensor(loop.losses), losses, "losses and norms")
        for name, parameter in loop.parameters().items():
            close(parameter, self._parameters[name], f"parameter {name}")

    def check_results(self, loop: Loop) -> None:
        """What is gathered for metrics is the global batch, once."""
        batch = next(iter(loop.loader))
        loop.model.eval()
        unsharded = language_model().eval()
        unsharded.load_state_dict(self._parameters, strict=False)
        with torch.no_grad():
            logits = loop.model(**batch).logits
            expected = unsharded(batch["input_ids"]).logits
        found = loop.accelerator.gather_for_metrics((logits, batch["labels"]))
        close(found[0], expected, "logits")
        assert torch.equal(found[1], batch["labels"])
        count = torch.tensor(BATCH)
        assert loop.accelerator.reduce(count) == loop.accelerator.gather(count) == BATCH
        assert loop.accelerator.pad_across_processes(logits, dim=1).shape == expected.shape
        self.check_last_batch(loop.accelerator)
        loop.model.train()

    @staticmethod
    def check_last_batch(accelerator: Accelerator) -> None:
        """Of a last smaller batch, as many rows as it has, also of objects and repeated losses."""
        rows = BATCH // 2 + 1
        loader = accelerator.prepare(DataLoader(Texts(BATCH + rows), BATCH))
        sizes = []
        for batch in loader:
            loss, ids = accelerator.gather_for_metrics((torch.ones(BATCH), batch["input_ids"]))
            objects = accelerator.gather_for_metrics(list("abcdefgh"), use_gather_object=True)
            sizes.append(
                (len(loss), len(ids), len(objects), len(accelerator.gather(torch.ones(8))))
            )
        assert sizes == [(BATCH, BATCH, BATCH, 8), (rows, rows, rows, 8)]

    def check_saved(self, loop: Loop, folder: str) -> None:
        """Full weights, in files and in memory; saving again replaces them."""
        loop.accelerator.save_model(loop.model, folder, max_shard_size="1KB")
        loop.accelerator.save_model(loop.model, folder)
        found = [load_file(f"{folder}/model.safetensors")]
        state = loop.accelerator.get_state_dict(loop.model)
        assert bool(state) == loop.accelerator.is_main_process
        for tensors in filter(None, [*found, state]):
            for name, parameter in self._parameters.items():
                close(tensors[name], parameter, name)


@dataclass
class Kept:
    """States that are saved twice, fail, are mixed or registered: the former one stays whole."""

    mesh: str

    def prepare(self) -> None:
        for mesh in MESHES:
            plans_of(mesh, counts=False)

    def __call__(self) -> None:
        (other,) = set(MESHES) - {self.mesh}
        with launched_process(), shared_folder() as folder:
            accelerator, model, average = self.prepared(self.mesh, folder)
            first = self.saved(accelerator, model, average, 1.0)
            self.saved(accelerator, model, average, 2.0)
            self.check_failing(accelerator, model, average)
            assert [path.name for path in first.parent.iterdir()] == ["checkpoint_1"]
            # On the other mesh, from the state that was saved last.
            accelerator, model, average = self.prepared(other, folder)
            accelerator.load_state()
            self.check(model, average, 2.0)
            self.check_mixed(accelerator, folder)

    def prepared(self, mesh: str, folder: str) -> tuple[Accelerator, nn.Module, nn.Module]:
        plans = plans_of(mesh, counts=False)
        model = parallelize(language_model(), plans, device_mesh(plans["train"]))
        names = {"automatic_checkpoint_naming": True, "total_limit": 1}
        settings = ProjectConfiguration(folder, **names)
        accelerator = PlannedAccelerator(project_config=settings)
        average = AveragedModel(model)
        accelerator.prepare(model)
        accelerator.register_for_checkpointing(average)
        return accelerator, model, average

    def become(self, model: nn.Module, average: nn.Module, number: float) -> None:
        with torch.no_grad():
            for parameter, averaged in zip(
                model.parameters(), average.module.parameters(), strict=True
            ):
                rows = torch.arange(len(parameter), dtype=parameter.dtype)
                whole = rows.view(-1, *[1] * (parameter.ndim - 1)).expand(parameter.shape)
                parameter.copy_(whole + number)
                averaged.copy_(whole - number)

    def saved(
        self, accelerator: Accelerator, model: nn.Module, average: nn.Module, number: float
    ) -> Path:
        self.become(model, average, number)
        return Path(accelerator.save_state())

    def check(self, model: nn.Module, average: nn.Module, number: float) -> None:
        for one, sign in ((model, 1), (average.module, -1)):
            for name, parameter in one.named_parameters():
                full = full_tensor(parameter.detach())
                rows = torch.arange(len(full), dtype=full.dtype) + sign * number
                assert torch.equal(full.flatten(1)[:, 0] if full.ndim > 1 else full, rows), name

    def check_failing(self, accelerator: Accelerator, model: nn.Module, average: nn.Module) -> None:
        """A rank that cannot write is an error on all, and the former state is loaded."""
        is_first = accelerator.is_main_process
        match = "No space left" if is_first else "on another rank: see the error of rank 0"
        for function in ("torch.save", "autoshard.checkpoint.saving.write_header"):
            full_disk = OSError(28, "No space left on device")
            fails = mock.patch(function, side_effect=full_disk) if is_first else nullcontext()
            with fails, pytest.raises(CheckpointError, match=match):
                self.saved(accelerator, model, average, 3.0)
            accelerator.load_state()
            self.check(model, average, 2.0)

    def check_mixed(self, accelerator: Accelerator, folder: str) -> None:
        """Files of two states are refused, whichever they are."""
        (state,) = Path(folder, "checkpoints").glob("*/planned-save-*")
        files = [path for path in sorted(state.rglob("*")) if path.is_file()]
        for path in (files[0], next(path for path in files if path.suffix == ".safetensors")):
            torch.distributed.barrier()
            contents = path.read_bytes()
            torch.distributed.barrier()
            if accelerator.is_main_process:
                path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
            torch.distributed.barrier()
            with pytest.raises(CheckpointError, match=rf"{path.name}' has other contents"):
                accelerator.load_state()
            torch.distributed.barrier()
            if accelerator.is_main_process:
                path.unlink()
            torch.distributed.barrier()
            with pytest.raises(CheckpointError, match=rf"{path.name}' is missing"):
                accelerator.load_state()
            torch.distributed.barrier()
            if accelerator.is_main_process:
                path.write_bytes(contents)
        torch.distributed.barrier()
        accelerator.load_state()


def check_refused() -> None:
    """Processes that are not those of the plan, and loaders of other batches."""
    plans = plans_of("4", counts=False)
    mesh = device_mesh(plans["train"])
    with launched_process():
        model: Any = parallelize(language_model(), plans, mesh)
        accelerator = PlannedAccelerator()
        accelerator.state.num_processes = 2
        with pytest.raises(PlanError, match="runs on 2 processes and the plan is for 4"):
            accelerator.prepare(model)


CASES: dict[str, Callable[[], None]] = {
    **{f"accelerated, {mesh}": Accelerated(mesh) for mesh in MESHES},
    **{f"kept, {mesh}": Kept(mesh) for mesh in MESHES},
    "refused": check_refused,
}
