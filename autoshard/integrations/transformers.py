"""`PlannedTrainer`: planned models with the Trainer of transformers.

    model = parallelize(model, {"train": train, "eval": evaluate}, device_mesh)
    trainer = PlannedTrainer(model, args, train_dataset=..., eval_dataset=...)
    trainer.train(resume_from_checkpoint=True)

A plan is for the global batch: the ranks of its mesh together run one copy of the model, as one
device would. `per_device_train_batch_size` and `per_device_eval_batch_size` are the batch sizes of
the plans, and every rank gets the whole batch.

A subclass of Trainer comes after it: `class Mine(PlannedTrainer, Seq2SeqTrainer)`.
"""

import shutil
from copy import copy
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from autoshard.base.extras import from_extra
from autoshard.checkpoint import load_checkpoint
from autoshard.checkpoint.files import on_first_rank
from autoshard.errors import PlanError
from autoshard.integrations.accelerate import PlannedAccelerator
from autoshard.integrations.checkpoints import (
    load_optimizers,
    mesh_of,
    move_files,
    new_folder,
    replace_weights,
    settle_all,
    whole_version,
    write_optimizers,
)
from autoshard.runtime.parallelize import Planned, planned_programs

with from_extra("transformers"):
    from transformers import PreTrainedModel, Trainer
    from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
    from transformers.utils import is_peft_available

_OPTIMIZERS = "optimizers"
"""Folder of the state of the optimizer in a checkpoint."""

_NUM_ITEMS = "num_items_in_batch"
"""The argument with which Trainer divides the loss of a micro-batch by the labels of the step."""


_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Settings with which Trainer changes the model before training: what is recomputed is planned."""


class PlannedTrainer(Trainer):
    """A `Trainer` for models that `parallelize` returned.

    Its arguments are those of `Trainer`. Models, loaders and metrics are treated as
    `PlannedAccelerator` does. Checkpoints have full weights as safetensors files, which
    `from_pretrained` reads, and the state of the optimizer in the format of
    `torch.distributed.checkpoint`; another plan may resume from them.

    Raises:
        PlanError: the model was not returned by `parallelize`, or its loss would be divided by
            another number than with `Trainer`.
    """

    args: Any
    _staging: Path | None = None
    _is_pushed = False
    label_names: list[str]
    model_accepts_loss_kwargs: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        programs = planned_programs(self.model)
        self.args = copy(self.args)
        for name in _CHECKPOINTING:
            setattr(self.args, name, False)
        taken = [program.arguments.names for program in programs]
        lacking = [n for n in taken if _NUM_ITEMS not in n and not n.isdisjoint(self.label_names)]
        if self.model_accepts_loss_kwargs and lacking:
            raise PlanError(
                f"Trainer divides the loss by the number of labels in all micro-batches of a step, "
                f"for which the plan has no argument: export the model with "
                f"{_NUM_ITEMS}=torch.tensor(1.0) among the arguments, and plan again; or set "
                f"model.accepts_loss_kwargs = False for the mean of the micro-batches' losses"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as one for planned models."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PlannedAccelerator
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave a planned model on the devices of its mesh."""
        if not isinstance(model, Planned):
            super()._move_model_to_device(model, device)

    def get_train_dataloader(self) -> Any:
        """A loader of global batches; its workers draw the same random numbers on all ranks."""
        loader = super().get_train_dataloader()
        if isinstance(loader.worker_init_fn, partial):
            loader.worker_init_fn = partial(loader.worker_init_fn, rank=0)
        return loader

    def get_tp_size(self) -> int:
        """The number of ranks with the same batch: all."""
        return int(self.args.world_size)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The number of labels in global batches, which no other rank has others of."""
        items = super()._get_num_items_in_batch(batch_samples, device)
        return (items * self.get_tp_size()).round() if isinstance(items, torch.Tensor) else items

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save full weights and what `from_pretrained` needs; called on all ranks."""
        del state_dict
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if self._is_peft:
            save_adapters(self.model, folder)
        else:
            replace_weights(self.model, folder)
        on_first_rank(mesh_of(self.model), partial(self._save_others, folder))

    def _save_others(self, folder: Path) -> None:
        """Save what `from_pretrained` needs besides weights, and the arguments."""
        if not self._is_peft:
            _save_config(self.model, folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; what an interrupted save has left is removed first."""
        self.settle_saves()
        return super().train(*args, **kwargs)

    def settle_saves(self) -> None:
        """Remove what interrupted saves have left; a checkpoint that was moved away is back."""
        folder = Path(self.args.output_dir)
        name = rf"{PREFIX_CHECKPOINT_DIR}-\d+"
        on_first_rank(mesh_of(self.model), lambda: settle_all(folder, name))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save into a new folder, which takes its place when it is whole; called on all ranks."""
        place = Path(super()._get_output_dir(trial))
        place /= f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            with new_folder(place, mesh_of(self.model)) as self._staging:
                super()._save_checkpoint(model, trial)
                self._name_best(place)
        finally:
            self._staging = None
        if self._is_pushed:
            self._push_from_checkpoint(str(place))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(place.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _name_best(self, place: Path) -> None:
        """Name the best checkpoint as it will be named, if it is this one."""
        assert self._staging is not None
        if self.state.best_model_checkpoint == str(self._staging / place.name):
            self.state.best_model_checkpoint = str(place)
            if self.args.should_save:
                self.state.save_to_json(str(self._staging / place.name / TRAINER_STATE_NAME))

    def _get_output_dir(self, trial: Any) -> str:
        """The folder of checkpoints; while one is saved, where it is made."""
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint; one that is made is uploaded when it is in its place."""
        self._is_pushed = self._staging is not None
        if not self._is_pushed:
            super()._push_from_checkpoint(checkpoint_folder)

    @property
    def _is_peft(self) -> bool:
        if not is_peft_available():
            return False
        from peft import PeftModel  # noqa: PLC0415  optional

        return isinstance(self.model, PeftModel)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save shards of the optimizer's state, and the scheduler."""
        folder = Path(output_dir)
        write_optimizers(self.model, [self.optimizer.optimizer], folder / _OPTIMIZERS)
        state = self.lr_scheduler.state_dict()
        on_first_rank(mesh_of(self.model), lambda: torch.save(state, folder / SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what was saved, also by a Trainer of an unsharded model."""
        if checkpoint is None or not (Path(checkpoint) / _OPTIMIZERS).exists():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizers(self.model, [self.optimizer.optimizer], Path(checkpoint) / _OPTIMIZERS)
        scheduler = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights; each rank reads its shards."""
        whole_version(Path(resume_from_checkpoint), mesh_of(self.model))
        if self._is_peft:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_checkpoint(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self._is_peft:
            super()._load_best_model()
        else:
            load_checkpoint(self.model, self.state.best_model_checkpoint)


def save_adapters(model: Any, folder: str | PathLike[str]) -> None:
    """Save the trainable adapters of a planned PEFT model as `PeftModel.save_pretrained` does.

    The files have full tensors, and replace earlier ones when they are on the disk. All ranks must
    call it; rank 0 writes.

    Args:
        model: a `PeftModel` that `parallelize` returned.
        folder: where to save.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    place = Path(folder)
    staging = place.with_name(f".{place.name}.unfinished")

    def save() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        try:
            model.save_pretrained(staging, state_dict=state)
            move_files(staging, place)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    on_first_rank(mesh_of(model), save)


def _save_config(model: nn.Module, folder: Path) -> None:
    """Save the configurations that `from_pretrained` reads."""
    if not isinstance(model, PreTrainedModel):
        return
    config = copy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
