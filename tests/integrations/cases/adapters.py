"""LoRA with PEFT: only adapters are trained, and saved whole."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.comparison import close, device_mesh
from support.language_models import (
    BATCH,
    LENGTH,
    MESHES,
    SHAPES,
    Texts,
    language_model,
    with_settings,
)
from support.meshes import slow_devices
from support.models import graph_of
from support.processes import launched_process
from support.shared_folder import shared_folder
from torch import nn
from transformers import Trainer, TrainingArguments

from autoshard.errors import PlanError
from autoshard.integrations.transformers import PlannedTrainer, save_adapters
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import full_tensor, parallelize

STEPS, SAVED_AFTER = 6, 3
CONFIG = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.0, fan_in_fan_out=True)


@contextmanager
def peft_of_older_transformers() -> Iterator[None]:
    """A context in which peft may use names that transformers deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield


def adapted() -> PeftModel:
    """GPT-2 with adapters, of which no matrix is zero."""
    with peft_of_older_transformers():
        model = get_peft_model(language_model(), deepcopy(CONFIG))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


def trained(kind: type[Trainer], model: nn.Module, folder: str, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        folder,
        **with_settings(
            max_steps=STEPS, logging_steps=1, save_steps=SAVED_AFTER, label_names=["labels"]
        ),
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


def first_batch() -> dict[str, torch.Tensor]:
    rows = Texts(BATCH)
    names = ("input_ids", "labels")
    return {name: torch.stack([rows[n][name] for n in range(BATCH)]) for name in names}


@contextmanager
def disabled(model: PeftModel) -> Iterator[None]:
    with model.disable_adapter():
        yield


@contextmanager
def merged(model: PeftModel) -> Iterator[None]:
    with peft_of_older_transformers():
        model.merge_adapter()
        yield
        model.unmerge_adapter()


STATES: dict[str, Callable[[PeftModel], AbstractContextManager[None]]] = {
    "trained": lambda _: nullcontext(),
    "disabled": disabled,
    "merged": merged,
}
REFUSED = {
    "disabled": r"_adapters_disabled', which is True now.*which may be passed together",
    "merged": r"merged_adapters', which is \['default'\] now.*which may be passed together",
}


@dataclass
class Switched:
    """Adapters that are disabled or merged: an error, or right with a plan for each state.

    Attributes:
        mesh: one of `SHAPES`.
    """

    mesh: str
    plans: dict[str, Plan] = field(default_factory=dict)

    def prepare(self) -> None:
        inputs = {"*": ",".join(["S(0)", *["R"] * (len(SHAPES[self.mesh]) - 1)])}
        for name, state in STATES.items():
            pins = dict(self.plans["trained"].state_pins()) if self.plans else {}
            model = adapted()
            with state(model):
                graph = graph_of((model, first_batch()))
            mode = "training" if name == "trained" else "inference"  # nothing is left to train
            settings = {"mode": mode, "pins": {**pins, "inputs": inputs}}
            options = PlanOptions(**settings)
            self.plans[name] = make_plan(graph, slow_devices(**SHAPES[self.mesh]), options)
            assert self.plans[name].found

    def __call__(self) -> None:
        batch = first_batch()
        expected = {}
        for name, state in STATES.items():
            model = adapted()
            with state(model):
                expected[name] = model(**batch).loss.detach()
        assert not torch.isclose(expected["trained"], expected["disabled"], rtol=1e-4)
        mesh = device_mesh(self.plans["trained"])
        one = parallelize(adapted(), self.plans["trained"], mesh)
        every = parallelize(adapted(), self.plans, mesh)
        for name in ("trained", "disabled", "trained", "merged", "trained"):
            with STATES[name](every):
                close(every(**batch).loss.detach(), expected[name], name)
            with STATES[name](one):
                if name in REFUSED:
                    with pytest.raises(PlanError, match=REFUSED[name]):
                        one(**batch)
                else:
                    close(one(**batch).loss.detach(), expected[name], name)
        self.check_others(one, batch, expected)

    def check_others(
        self, model: Any, batch: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
    ) -> None:
        """Names and the active adapter are as before; other adapters are refused."""
        assert type(model).__name__ == "PeftModel"
        assert type(model.get_base_model()).__name__ == "GPT2LMHeadModel"
        model.set_adapter("default")
        close(model(**batch).loss.detach(), expected["trained"], "set_adapter")
        model.base_model.disable_adapter_layers()
        with pytest.raises(PlanError, match="_disable_adapters', which is True now"):
            model(**batch)
        model.base_model.enable_adapter_layers()
        close(model(**batch).loss.detach(), expected["trained"], "enable_adapter_layers")
        with peft_of_older_transformers():
            model.add_adapter("other", CONFIG)
        with pytest.raises(PlanError, match=r"replaced, added or removed.*then export and plan"):
            model(**batch)


CASES: dict[str, Callable[[], None]] = {
    **{f"lora, {mesh}": Adapted(mesh) for mesh in MESHES},
    **{f"switched, {mesh}": Switched(mesh) for mesh in MESHES},
}
ON_2: dict[str, Callable[[], None]] = {"switched, 2": Switched("2")}
