"""LoRA with PEFT: only adapters are trained, and saved whole."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.comparison import close, device_mesh
from support.language_models import BATCH, LENGTH, MESHES, Texts, language_model
from support.meshes import slow_devices
from support.models import graph_of
from support.processes import launched_process
from support.shared_folder import shared_folder
from torch import nn
from transformers import Trainer, TrainingArguments

from autoshard.integrations.transformers import PlannedTrainer, save_adapters
from autoshard.plan import Plan
from autoshard.planner import make_plan
from autoshard.runtime import full_tensor, parallelize

STEPS, SAVED_AFTER = 6, 3


@contextmanager
def peft_of_older_transformers() -> Iterator[None]:
    """A context in which peft may use names that transformers deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield


def adapted() -> PeftModel:
    """GPT-2 with adapters, of which no matrix is zero."""
    config = LoraConfig(
        r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.0, fan_in_fan_out=True
    )
    with peft_of_older_transformers():
        model = get_peft_model(language_model(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


def trained(kind: type[Trainer], model: nn.Module, folder: str, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=SAVED_AFTER,
        label_names=["labels"],
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = kind(model, arguments, train_dataset=Texts(3 * BATCH))
    trainer.train(**options)
    return trainer


def losses(trainer: Trainer) -> torch.Tensor:
    return torch.tensor([log["loss"] for log in trainer.state.log_history if "loss" in log])


@dataclass
class Adapted:
    """A PEFT model is exported, planned, trained, saved, resumed, and loaded without a plan.

    Attributes:
        mesh: one of `MESHES`.
    """

    mesh: str
    plan: Plan = field(init=False)
    expected: torch.Tensor = field(init=False)
    parameters: dict[str, torch.Tensor] = field(init=False)

    def prepare(self) -> None:
        names = ("input_ids", "labels")
        batch = {name: torch.zeros(BATCH, LENGTH, dtype=torch.int64) for name in names}
        batch["num_items_in_batch"] = torch.tensor(1.0)
        self.plan = make_plan(graph_of((adapted(), batch)), slow_devices(**MESHES[self.mesh]))
        layouts = {i.target: i.layout for i in self.plan.stages[0].parameters}
        assert any("S" in layout for name, layout in layouts.items() if "lora" in name)
        with launched_process(), TemporaryDirectory() as folder:
            trainer = trained(Trainer, adapted(), folder)
        self.expected = losses(trainer)
        parameters = trainer.model.named_parameters()
        self.parameters = {name: p.detach().clone() for name, p in parameters}

    def __call__(self) -> None:
        with launched_process(), shared_folder() as folder:
            trainer = trained(PlannedTrainer, self.planned(), folder)
            self.check(trainer)
            save_adapters(trainer.model, f"{folder}/adapters")
            self.check_saved(f"{folder}/adapters")
            self.check_saved(f"{folder}/checkpoint-{STEPS}")
            resumed = trained(
                PlannedTrainer,
                self.planned(),
                folder,
                resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_AFTER}",
            )
            self.check(resumed)

    def planned(self) -> nn.Module:
        return parallelize(adapted(), self.plan, device_mesh(self.plan))

    def check(self, trainer: Trainer) -> None:
        close(losses(trainer), self.expected, "losses")
        for name, parameter in trainer.model.named_parameters():
            close(full_tensor(parameter.detach()), self.parameters[name], name)
            assert parameter.requires_grad == ("lora" in name)

    def check_saved(self, folder: str) -> None:
        """The file has the adapters and nothing else; an unsharded PEFT model loads it."""
        assert all("lora" in name for name in load_file(f"{folder}/adapter_model.safetensors"))
        with peft_of_older_transformers():
            loaded = PeftModel.from_pretrained(language_model(), folder)
        for name, parameter in loaded.named_parameters():
            close(parameter.detach(), self.parameters[name], name)


CASES: dict[str, Callable[[], None]] = {f"lora, {mesh}": Adapted(mesh) for mesh in MESHES}
