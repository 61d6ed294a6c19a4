"""`PlannedTrainer`: the numbers of `Trainer` in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.comparison import close, device_mesh
from support.language_models import (
    BATCH,
    LENGTH,
    MESHES,
    Texts,
    language_model,
    plans_of,
    with_settings,
)
from support.processes import launched_process
from support.shared_folder import shared_folder
from torch import nn
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from autoshard.errors import PlanError
from autoshard.integrations.transformers import PlannedTrainer
from autoshard.runtime import full_tensor, parallelize, rng_step

STEPS, FEW_STEPS = 20, 4
ROWS = 5 * BATCH
"""An epoch has two steps of two micro-batches, and one of one."""


def settings(folder: str, steps: int = STEPS, **changed: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_steps": steps,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": steps // 4,
        "save_steps": steps // 2,
        "save_strategy": "steps",
    }
    return TrainingArguments(folder, **with_settings(**(options | changed)))


def planned(mesh: str, dropout: float = 0.0, **options: Any) -> nn.Module:
    plans = plans_of(mesh, dropout, **options)
    return parallelize(language_model(dropout), plans, device_mesh(plans["train"]))


def trainer_of(kind: type[Trainer], model: nn.Module, arguments: TrainingArguments) -> Trainer:
    return kind(model, arguments, train_dataset=Texts(ROWS), eval_dataset=Texts(2 * BATCH))


def numbers(trainer: Trainer) -> torch.Tensor:
    """Losses, norms of gradients, learning rates and losses of evaluation, in order."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    found = [log[name] for log in trainer.state.log_history for name in names if name in log]
    return torch.tensor(found)


def check_parameters(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        close(full_tensor(parameter.detach()), expected[name], f"parameter {name}")


@dataclass
class Trained:
    """Trained as in one process; then resumed on the other mesh. Its embeddings are tied.

    Attributes:
        mesh: one of `MESHES`.
        unsharded: whether to resume from a checkpoint of the unsharded model.
        steps: of the training; the checkpoint is of the one in the middle.
        interleaved: whether fused weights are sharded inside each of their parts.
        compiles: whether the planned model is trained compiled.
    """

    mesh: str
    unsharded: bool = False
    steps: int = STEPS
    interleaved: bool = False
    compiles: bool = False
    _folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    _expected: torch.Tensor = field(init=False)
    _parameters: dict[str, torch.Tensor] = field(init=False)

    def prepare(self) -> None:
        for mesh in MESHES:
            plans_of(mesh, interleaved=self.interleaved)
        with launched_process():
            arguments = settings(self._folder.name, self.steps)
            trainer = trainer_of(Trainer, language_model(), arguments)
            trainer.train()
        self._expected = numbers(trainer)
        assert len(self._expected) == 3 * self.steps + 4
        parameters = trainer.model.named_parameters()
        self._parameters = {name: p.detach().clone() for name, p in parameters}

    def __call__(self) -> None:
        with launched_process(), shared_folder() as folder:
            trainer = self.trainer(self.mesh, folder)
            trainer.train()
            close(numbers(trainer), self._expected, "logs")
            check_parameters(trainer.model, self._parameters)
            self.check_saved(f"{folder}/checkpoint-{self.steps}")
            self.check_resumed(folder)

    def trainer(self, mesh: str, folder: str) -> Trainer:
        compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        arguments = settings(folder, self.steps, **compiled if self.compiles else {})
        model = planned(mesh, interleaved=self.interleaved)
        return trainer_of(PlannedTrainer, model, arguments)

    def check_saved(self, folder: str) -> None:
        """`from_pretrained` reads a checkpoint."""
        unsharded = GPT2LMHeadModel.from_pretrained(folder)
        assert unsharded.config.architectures == ["GPT2LMHeadModel"]
        check_parameters(unsharded, self._parameters)

    def check_resumed(self, folder: str) -> None:
        """Another plan goes on from the checkpoint in the middle of an epoch."""
        (other,) = set(MESHES) - {self.mesh}
        trainer = self.trainer(other, folder)
        source = self._folder.name if self.unsharded else folder
        trainer.train(resume_from_checkpoint=f"{source}/checkpoint-{self.steps // 2}")
        close(numbers(trainer), self._expected, "logs")
        check_parameters(trainer.model, self._parameters)


@dataclass
class Dropped:
    """Dropout acts in training, not in evaluation; a resumed training draws the same numbers."""

    mesh: str

    def prepare(self) -> None:
        plans_of(self.mesh, 0.2)

    def __call__(self) -> None:
        with launched_process(), shared_folder() as folder:
            arguments = settings(
                folder,
                gradient_accumulation_steps=1,
                max_steps=6,
                save_steps=3,
                eval_steps=3,
                load_best_model_at_end=True,
            )
            trainer = trainer_of(PlannedTrainer, self.planned(), arguments)
            trainer.train()
            step = rng_step(trainer.model).value
            self.check_predictions(trainer)
            resumed = trainer_of(PlannedTrainer, self.planned(), arguments)
            resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
            close(numbers(resumed), numbers(trainer), "logs", 1e-6)
            assert rng_step(resumed.model).value == step

    def planned(self) -> nn.Module:
        return planned(self.mesh, 0.2)

    def check_predictions(self, trainer: Trainer) -> None:
        """The best model was loaded; it predicts without dropout, each row once."""
        texts = Texts(2 * BATCH)
        found, labels, _ = trainer.predict(texts)
        assert labels.shape == (2 * BATCH, LENGTH)
        unsharded = GPT2LMHeadModel.from_pretrained(trainer.state.best_model_checkpoint)
        with torch.no_grad():
            expected = unsharded.eval()(torch.stack([row["input_ids"] for row in texts])).logits
        close(torch.tensor(found), expected, "predictions")


def check_refused() -> None:
    """What would give other numbers than Trainer is an error; what is slow is a warning."""
    with launched_process(), shared_folder() as folder:
        with pytest.raises(PlanError, match="apply a plan with parallelize first"):
            trainer_of(PlannedTrainer, language_model(), settings(folder))
        with pytest.raises(PlanError, match=r"num_items_in_batch=torch.tensor\(1.0\)"):
            trainer_of(PlannedTrainer, planned("4", counts=False), settings(folder))
        small = settings(folder, per_device_train_batch_size=2, max_steps=1, save_strategy="no")
        trainer = trainer_of(PlannedTrainer, planned("4"), small)
        with pytest.warns(UserWarning, match="run the unsharded model"):
            trainer.train()


@dataclass
class Autocast:
    """`bf16=True` changes nothing for a plan in bfloat16, and is an error for one in float32.

    Attributes:
        mesh: one of `MESHES`.
    """

    mesh: str

    def prepare(self) -> None:
        plans_of(self.mesh, mixed_precision="bfloat16")
        plans_of(self.mesh)

    def __call__(self) -> None:
        with launched_process(), shared_folder() as folder:
            short = partial(settings, folder, max_steps=2, eval_steps=2, save_strategy="no")
            found = []
            for bf16 in (True, False):
                model = planned(self.mesh, mixed_precision="bfloat16")
                trainer = trainer_of(PlannedTrainer, model, short(bf16=bf16))
                trainer.train()
                found.append(numbers(trainer))
            assert torch.equal(*found)
            trainer = trainer_of(PlannedTrainer, planned(self.mesh), short(bf16=True))
            with pytest.raises(PlanError, match="mixed_precision='bfloat16'"):
                trainer.train()


CASES: dict[str, Callable[[], None]] = {
    **{f"trained, {mesh}": Trained(mesh, unsharded=mesh == "2x2") for mesh in MESHES},
    "interleaved": Trained("4", steps=FEW_STEPS, interleaved=True),
    "compiled": Trained("4", steps=FEW_STEPS, compiles=True),
    **{f"dropout, {mesh}": Dropped(mesh) for mesh in MESHES},
    "autocast": Autocast("4"),
    "refused": check_refused,
}
