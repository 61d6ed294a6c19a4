"""`PlannedAccelerator`: planned models with accelerate.

    accelerator = PlannedAccelerator(gradient_accumulation_steps=4)
    model = parallelize(model, plan, device_mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

A plan is for the global batch: the ranks of its mesh together run one copy of the model, as one
device would. So every rank gets the whole batch, of which forward takes its shard, and what
accelerate does per data-parallel process is done as for one.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from autoshard.base.extras import from_extra
from autoshard.checkpoint import load_checkpoint
from autoshard.checkpoint.files import on_first_rank, raised_as_one
from autoshard.errors import ArgumentTypeError, CheckpointError, PlanError
from autoshard.integrations.checkpoints import (
    is_whole,
    load_optimizers,
    mesh_of,
    new_version,
    replace_weights,
    whole_version,
    write_optimizers,
)
from autoshard.runtime import full_tensor
from autoshard.runtime.checks.agreement import broadcast_text
from autoshard.runtime.parallelize import Planned, planned_forward
from autoshard.runtime.parameters.state_dicts import placed_like
from autoshard.torch_private import pytree

with from_extra("transformers"):
    from accelerate import Accelerator, DistributedType
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import convert_file_size_to_int

_PLAIN = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
)
"""Kinds of launches in which accelerate leaves models and optimizers to the program."""


class PlannedAccelerator(Accelerator):
    """An `Accelerator` for planned models.

    It differs in the following:

    * planned models are not wrapped, and keep their shards;
    * loaders yield the same global batches on all ranks, shuffled as on rank 0;
    * prepared learning-rate schedulers step once per step of the optimizer;
    * `gather`, `gather_for_metrics`, `reduce` and `pad_across_processes` return full tensors of
      what is sharded, and all else unchanged: every rank has the results of the whole batch;
    * `save_state` and `load_state` write and read shards, which another plan may load;
      `save_model` and `get_state_dict` give full tensors.

    Gradient accumulation (`accumulate`, `no_sync`), clipping and gradient scaling work as ever.
    """

    _custom_objects: list[Any]
    _dataloaders: list[Any]
    _models: list[Any]
    _optimizers: list[Any]

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model; a planned one is not wrapped in `DistributedDataParallel`.

        Raises:
            PlanError: the processes are not those of the plan's mesh.
        """
        if isinstance(model, Planned):
            self._check_launch(model)
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement, evaluation_mode)

    def _check_launch(self, model: Any) -> None:
        mesh = planned_forward(model).mesh
        if self.distributed_type not in _PLAIN or self.parallelism_config is not None:
            raise PlanError(
                f"accelerate was started for {self.distributed_type}, which would shard the model "
                f"again: launch without plugins, as with torchrun or `autoshard launch`"
            )
        if self.num_processes != mesh.size():
            raise PlanError(
                f"accelerate runs on {self.num_processes} processes and the plan is for "
                f"{mesh.size()}: launch as many with torchrun or `autoshard launch`, before the "
                f"Accelerator is created"
            )

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> DataLoader[Any]:
        """Prepare a loader of global batches; every rank gets all rows, in the order of rank 0."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        prepared: DataLoader[Any] = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=["torch"],
            dispatch_batches=False,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a learning-rate scheduler; it steps once per step of the optimizer."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # or it would step once per process
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients by their norm over all ranks; returns the norm as a plain tensor."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather(self, tensor: Any) -> Any:
        """Full tensors of what is sharded; all else is the same on every rank already."""
        return full_tensor(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`; of the last batch of a loader, at most as many rows as it has.

        Programs repeat a loss as often as a whole batch has rows, for means over all rows.
        """
        del use_gather_object  # every rank has all objects
        gathered = full_tensor(input_data)
        if all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(gathered)):
            return super().gather_for_metrics(gathered)
        state = self.gradient_state
        is_last = state.end_of_dataloader and state.remainder > 0
        return gathered[: state.remainder] if is_last and isinstance(gathered, list) else gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As `gather`: every rank has the result of the whole batch."""
        del reduction, scale
        return full_tensor(tensor)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """As `gather`: full tensors have one size on all ranks."""
        del dim, pad_index, pad_first
        return full_tensor(tensor)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Full tensors of a planned model on the CPU of rank 0; empty on the other ranks."""
        if not isinstance(model, Planned):
            return super().get_state_dict(model, unwrap)
        assert isinstance(model, nn.Module)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)

    def save_model(
        self,
        model: Any,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save full weights as safetensors; each rank writes from its own shards."""
        if not isinstance(model, Planned):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        assert isinstance(model, nn.Module)
        size = convert_file_size_to_int(max_shard_size)
        replace_weights(model, save_directory, max_file_bytes=size)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """Save the state of all that was prepared; that of planned models as shards.

        The files are in a folder of their own inside of `output_dir`; `checkpoint.json` beside it
        has its name, and digests of them. They replace an earlier state when they are on the disk.

        Raises:
            CheckpointError: a rank has failed; the earlier state is still there.
        """
        mesh = self._mesh()
        if mesh is None:
            return super().save_state(output_dir, safe_serialization, **options)
        with self._named_folder(output_dir, mesh) as folder:
            whole = [WholeState.gathered(one, self._keeps_all) for one in self._custom_objects]
            with new_version(folder, mesh) as version:
                with self._without_planned(whole) as planned, raised_as_one(mesh):
                    super().save_state(str(version), safe_serialization, **options)
                for number, (model, optimizers) in enumerate(planned):
                    place = _folder(version, number)
                    replace_weights(model, place)
                    write_optimizers(model, optimizers, place / "optimizers")
        return folder

    def _mesh(self) -> DeviceMesh | None:
        """The mesh of the planned models and of the tensors in registered objects."""
        planned: list[Any] = [model for model in self._models if isinstance(model, Planned)]
        if planned:
            return mesh_of(planned[0])
        states = [one.state_dict() for one in self._custom_objects]
        leaves = (leaf for state in states for leaf in pytree.tree_leaves(state))
        return next((leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)), None)

    @property
    def _keeps_all(self) -> bool:
        """True on the ranks that may write registered objects."""
        return bool(self.is_local_main_process)

    @contextmanager
    def _named_folder(self, output_dir: str | None, mesh: DeviceMesh) -> Iterator[Path]:
        """The folder of a state; with automatic names, the oldest ones are removed afterwards."""
        settings = self.project_configuration
        if not settings.automatic_checkpoint_naming:
            if output_dir is None:
                raise ArgumentTypeError("save_state needs a folder: pass output_dir")
            yield Path(output_dir)
            return
        folder = Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        on_first_rank(mesh, lambda: _check_new(folder))
        settings.automatic_checkpoint_naming = False
        number = settings.iteration
        try:
            yield folder
        except BaseException:
            settings.iteration = number
            with suppress(OSError):
                folder.rmdir()  # where nothing was before
            raise
        finally:
            settings.automatic_checkpoint_naming = True
        if settings.total_limit is not None:
            kept = max(settings.total_limit, 1)
            on_first_rank(mesh, lambda: _remove_all(_automatic(folder.parent)[:-kept]))

    def load_state(
        self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any
    ) -> None:
        """Load what `save_state` saved, under the same plan or another one.

        Raises:
            CheckpointError: the files are not those of one save.
        """
        mesh = self._mesh()
        if mesh is None:
            super().load_state(input_dir, load_kwargs, **options)
            return
        folder = whole_version(self._given_folder(input_dir, mesh), mesh)
        with self._without_planned([WholeState(one) for one in self._custom_objects]) as planned:
            super().load_state(str(folder), load_kwargs, **options)
        for number, (model, optimizers) in enumerate(planned):
            place = _folder(folder, number)
            load_checkpoint(model, place)
            load_optimizers(model, optimizers, place / "optimizers")

    def _given_folder(self, input_dir: str | None, mesh: DeviceMesh) -> Path:
        """The folder of a state to load; the last whole one with automatic names."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            found = _automatic(Path(self.project_dir) / "checkpoints")
            last = next((str(one) for one in reversed(found) if is_whole(one)), "")
            input_dir = broadcast_text(last, mesh) or None
        if input_dir is None:
            raise CheckpointError("there is no state to load: pass input_dir, as to save_state")
        return Path(input_dir).expanduser()

    @contextmanager
    def _without_planned(
        self, objects: list[Any]
    ) -> Iterator[list[tuple[nn.Module, list[torch.optim.Optimizer]]]]:
        """A context in which accelerate knows no planned model and none of their optimizers.

        Args:
            objects: in place of the registered ones.

        Yields:
            the planned models, each with its optimizers.
        """
        models, optimizers = self._models, self._optimizers
        planned: list[Any] = [model for model in models if isinstance(model, Planned)]
        owned = [[o for o in optimizers if _is_of(o, model)] for model in planned]
        taken = [id(optimizer) for group in owned for optimizer in group]
        self._models = [model for model in models if not isinstance(model, Planned)]
        self._optimizers = [o for o in optimizers if id(o) not in taken]
        registered, self._custom_objects = self._custom_objects, objects
        try:
            yield [
                (model, [o.optimizer for o in group])
                for model, group in zip(planned, owned, strict=True)
            ]
        finally:
            self._models, self._optimizers = models, optimizers
            self._custom_objects = registered


class WholeState:
    """A registered object whose state dict has full tensors in place of DTensors.

    Accelerate writes the state of rank 0, and loads it on all ranks.

    Args:
        registered: has `state_dict` and `load_state_dict`.
        state: with full tensors, of `gathered`.
    """

    def __init__(self, registered: Any, state: Any = None) -> None:
        self._registered = registered
        self._state = state

    @classmethod
    def gathered(cls, registered: Any, keeps: bool) -> Self:
        """Gather the state, on all ranks.

        Args:
            registered: the object.
            keeps: False on ranks that do not write it, which keep no full tensors.
        """

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            full = full_tensor(leaf.detach())
            return full.cpu() if keeps else None

        return cls(registered, pytree.tree_map(whole, registered.state_dict()))

    def state_dict(self) -> Any:
        """The state with full tensors."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Load a state; each rank takes its shards of what the object has as DTensors."""
        own = dict(pytree.tree_leaves_with_path(self._registered.state_dict()))

        def placed(path: Any, leaf: Any) -> Any:
            like: Any = own.get(path)
            return placed_like(leaf, like, pytree.keystr(path))

        self._registered.load_state_dict(pytree.tree_map_with_path(placed, state))


def _folder(folder: str | PathLike[str], number: int) -> Path:
    return Path(folder) / f"planned_{number}"


def _is_of(optimizer: Any, model: nn.Module) -> bool:
    """True if an optimizer has parameters of a model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _automatic(parent: Path) -> list[Path]:
    """The folders of states with automatic names, in the order of their numbers."""
    found = ((path, re.fullmatch(r"checkpoint_(\d+)", path.name)) for path in parent.glob("*"))
    numbers = {int(match[1]): path for path, match in found if match}
    return [numbers[number] for number in sorted(numbers)]


def _check_new(folder: Path) -> None:
    if folder.exists() and is_whole(folder):
        raise CheckpointError(
            f"{folder} is there already: set project_configuration.iteration to the number that "
            f"the next state shall have"
        )


def _remove_all(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
