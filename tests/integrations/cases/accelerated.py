"""`PlannedAccelerator`: the numbers of `Accelerator` in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from support.comparison import close, device_mesh
from support.language_models import BATCH, MESHES, Texts, language_model, plans_of
from support.processes import launched_process
from support.shared_folder import shared_folder
from torch import nn
from torch.utils.data import DataLoader

from autoshard.errors import PlanError
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
    "refused": check_refused,
}
