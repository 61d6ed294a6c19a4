"""Losses, metrics and settings of Trainer with `PlannedTrainer`, and names of planned models.

Batches of training and evaluation have a last smaller one.
"""

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from io import BytesIO
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import close, device_mesh
from support.language_models import BATCH, LENGTH, MESHES, SHAPES, Texts, with_settings
from support.meshes import slow_devices
from support.models import gpt2, graph_of
from support.processes import launched_process
from support.shared_folder import shared_folder
from torch import nn
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from autoshard.checkpoint import save_checkpoint
from autoshard.errors import CheckpointError
from autoshard.integrations.transformers import PlannedTrainer
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import full_tensor, parallelize

ROWS = BATCH + BATCH // 2 + 1
Numbers = list[float]


def model(*, checkpoints: bool = False) -> nn.Module:
    torch.manual_seed(0)
    made, _ = gpt2(layers=2)
    made.config.use_cache = False
    if checkpoints:
        made.activation_checkpointing_enable()
    return made


@cache
def plans(mesh: str, *, labels: bool) -> dict[str, Plan]:
    """Plans with the batch sharded: of the loss with checkpoints, or of logits."""
    batch = {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)}
    if labels:
        batch["labels"] = batch["input_ids"]
    rows = {name: ",".join(["S(0)", *["R"] * (len(SHAPES[mesh]) - 1)]) for name in batch}
    batch["num_items_in_batch"] = torch.tensor(1.0)
    made: dict[str, Plan] = {}
    for name, mode in (("train", "training"), ("eval", "inference")):
        pins = dict(made["train"].state_pins()) if made else {}
        graph = graph_of((model(checkpoints=labels).train(name == "train"), batch))
        options = PlanOptions(mode=mode, pins={**pins, "inputs": rows})
        made[name] = make_plan(graph, slow_devices(**SHAPES[mesh]), options)
        assert made[name].found
        assert made[name].collectives
    return made


def planned(mesh: str, *, labels: bool) -> nn.Module:
    found = plans(mesh, labels=labels)
    return parallelize(model(checkpoints=labels), found, device_mesh(found["train"]))


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss as programs write it: shifted, flattened, without ignored labels."""
    logits = outputs["logits"][..., :-1, :].contiguous()
    shifted = labels[..., 1:].contiguous()
    loss = nn.CrossEntropyLoss(reduction="sum")(logits.view(-1, logits.size(-1)), shifted.view(-1))
    return loss / ((shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def overriding(kind: type[Trainer]) -> type[Trainer]:
    """A trainer with a loss of its own."""

    class Own(kind):  # type: ignore[misc, valid-type]  # a class that is an argument
        def compute_loss(
            self,
            model: nn.Module,
            inputs: dict[str, Any],
            return_outputs: bool = False,  # noqa: FBT002  as in Trainer
            num_items_in_batch: Any = None,
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            loss = own_loss(outputs, labels, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    return Own


def metrics(found: Any) -> dict[str, float]:
    """Metrics of gathered logits and labels."""
    logits, labels = found.predictions, found.label_ids
    assert logits.shape[:2] == labels.shape == (ROWS, LENGTH)
    return {
        "accuracy": float((logits.argmax(-1) == labels).mean()),
        "size": float(np.abs(logits).sum()),
    }


def trained(kind: type[Trainer], trained_model: nn.Module, folder: str, **changed: Any) -> Trainer:
    passed = {n: changed.pop(n) for n in ("compute_loss_func", "compute_metrics") if n in changed}
    epoch = {"num_train_epochs": 1, "eval_strategy": "epoch", "save_strategy": "no"}
    settings = with_settings(logging_steps=1, **epoch, **changed)
    arguments = TrainingArguments(folder, **settings)
    data = {"train_dataset": Texts(ROWS + BATCH), "eval_dataset": Texts(ROWS)}
    trainer = kind(trained_model, arguments, **data, **passed)
    trainer.train()
    return trainer


def logged(trainer: Trainer) -> Numbers:
    """Losses, norms of gradients and metrics, in order."""
    names = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_size")
    return [log[name] for log in trainer.state.log_history for name in names if name in log]


def predicted(trainer: Trainer) -> Numbers:
    """Numbers of a prediction, in which no row is twice."""
    found = trainer.predict(Texts(ROWS))
    assert found.predictions.shape[:2] == found.label_ids.shape == (ROWS, LENGTH)
    return [found.metrics["test_loss"], float(np.abs(found.predictions).sum())]


VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "label smoothing": (False, {"label_smoothing_factor": 0.1}),
    "a function of the loss": (False, {"compute_loss_func": own_loss}),
    "accumulated": (False, {"compute_loss_func": own_loss, "gradient_accumulation_steps": 2}),
    "an overridden loss": (False, {"overriding": True}),
    "metrics": (True, {"compute_metrics": metrics, "eval_accumulation_steps": 1}),
    "checkpoints": (True, {"activation_checkpointing": True}),
}
"""By name: whether the plan has labels, and the settings of the trainer."""


@dataclass
class Like:
    """All variants, with the numbers of Trainer in one process.

    Attributes:
        mesh: one of `SHAPES`.
    """

    mesh: str
    expected: dict[str, Numbers] = field(default_factory=dict)

    def prepare(self) -> None:
        for labels in (False, True):
            plans(self.mesh, labels=labels)
        with launched_process(), TemporaryDirectory() as folder:
            for name in VARIANTS:
                self.expected[name] = self.run(Trainer, lambda **_: model(), name, folder)
        assert all(len(numbers) >= 3 for numbers in self.expected.values())

    def run(
        self, kind: type[Trainer], build: Callable[..., nn.Module], name: str, folder: str
    ) -> Numbers:
        labels, settings = VARIANTS[name]
        changed = dict(settings)
        kind = overriding(kind) if changed.pop("overriding", False) else kind
        trainer = trained(kind, build(labels=labels), folder, **changed)
        return [*logged(trainer), *(predicted(trainer) if labels else [])]

    def __call__(self) -> None:
        with launched_process(), shared_folder() as folder:
            for name, expected in self.expected.items():
                with pytest.warns(UserWarning, match="run the unsharded model"):
                    found = self.run(PlannedTrainer, partial(planned, self.mesh), name, folder)
                assert len(found) == len(expected), name
                close(torch.tensor(found), torch.tensor(expected), name)


@dataclass
class Named:
    """A planned model has the names of the model, and is not pickled.

    Attributes:
        mesh: one of `SHAPES`.
    """

    mesh: str

    def prepare(self) -> None:
        plans(self.mesh, labels=False)

    def __call__(self) -> None:
        found, expected = planned(self.mesh, labels=False), model()
        for one in (found, deepcopy(found)):
            assert isinstance(one, GPT2LMHeadModel)
            assert type(one).__name__ == one.__class__.__qualname__ == "GPT2LMHeadModel"
            assert repr(one).splitlines()[0] == repr(expected).splitlines()[0]
            assert signature(one.forward) == signature(expected.forward)
        for save in (pickle.dumps, lambda one: torch.save(one, BytesIO())):
            with pytest.raises(CheckpointError, match=r"cannot be pickled.*save_checkpoint\(model"):
                save(found)
        with shared_folder() as folder:
            self.check_saved(found, expected, folder)

    def check_saved(self, found: Any, expected: nn.Module, folder: str) -> None:
        """`from_pretrained` reads what the error of `save_pretrained` advises."""
        with pytest.raises(CheckpointError, match=r"shards: call save_checkpoint\(model, folder\)"):
            found.save_pretrained(folder)
        save_checkpoint(found, f"{folder}/one")
        state = full_tensor(found.state_dict())
        if torch.distributed.get_rank() == 0:
            found.config.save_pretrained(f"{folder}/one")
            found.save_pretrained(f"{folder}/other", state_dict=state)
        torch.distributed.barrier()
        for name in ("one", "other"):
            loaded = GPT2LMHeadModel.from_pretrained(f"{folder}/{name}")
            for key, value in expected.state_dict().items():
                assert torch.equal(loaded.state_dict()[key], value), (name, key)
        assert loaded.config.architectures == ["GPT2LMHeadModel"]


def cases(meshes: Any) -> dict[str, Callable[[], None]]:
    kinds: dict[str, Callable[[str], Callable[[], None]]] = {"like Trainer": Like, "names": Named}
    return {f"{name}, {mesh}": kind(mesh) for mesh in meshes for name, kind in kinds.items()}


CASES = cases(MESHES)
ON_2 = cases(["2"])
