"""Loads weights; each rank reads only its own shards."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from autoshard.base.arguments import check_arguments
from autoshard.checkpoint.readers import CheckpointReader, open_checkpoint
from autoshard.checkpoint.safetensors_file import TensorInfo
from autoshard.errors import CheckpointError
from autoshard.runtime.global_tensors.dtensors import local_tensor
from autoshard.runtime.parallelize import Planned, planned_forward
from autoshard.runtime.parameters.model_tensors import (
    ModelTensor,
    empty_like,
    mesh_device,
    model_tensors,
    non_persistent_buffers,
    other_state,
)
from autoshard.runtime.parameters.parameters import first_of
from autoshard.runtime.pipelining import Pipelined

NUM_DIFFERENCES = 10
"""Maximum number of differences between model and checkpoint in an error message."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Amount of data that one rank read from a checkpoint.

    Attributes:
        num_tensors: number of model tensors that were filled; tied ones count once.
        bytes_read: bytes that this rank read.
        bytes_stored: bytes of these tensors in the checkpoint, globally.
        seconds: duration.
    """

    num_tensors: int
    bytes_read: int
    bytes_stored: int
    seconds: float

    def __str__(self) -> str:
        share = self.bytes_read / self.bytes_stored if self.bytes_stored else 0.0
        return (
            f"read {self.bytes_read / 1e6:,.1f} of {self.bytes_stored / 1e6:,.1f} MB "
            f"({share:.1%}) for {self.num_tensors} tensors in {self.seconds:.2f} s"
        )


@check_arguments
def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] = str,
    optional: Collection[str] = (),
    ignored: Collection[str] = (),
    cast: bool = False,
) -> LoadReport:
    """Fill a model with the weights of a checkpoint; each rank reads its own shards.

    Call it on every rank, after `parallelize`. Parameters and buffers on the meta device are
    allocated on the mesh's device one by one, and only as shards. They become new objects, so
    create the optimizer afterwards. No collectives run.

    A checkpoint is

    * a safetensors file, or the `.index.json` of several, or the folder of either;
    * a file of `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`), or the index of several. It is
      memory-mapped and read with `weights_only=True`. Keys of nested dictionaries are joined
      by dots;
    * a folder of `torch.distributed.checkpoint`, also with keys joined by dots.

    Tied tensors may be stored under one of their names, or under several if all are equal.

    Args:
        model: a model returned by `parallelize`, or any other module, which is read in full.
        path: path of the checkpoint.
        rename: maps the name of a tensor in the model to that in the checkpoint, such as
            `lambda name: "model." + name`.
        optional: patterns (as of `fnmatch`) of model tensors that the checkpoint need not
            contain; they keep their values, so they must not be on the meta device.
        ignored: patterns of checkpoint tensors that the model need not have.
        cast: True to convert tensors of other dtypes to those of the model.

    Returns:
        The amount of data that this rank read.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit the model, which is then
            unchanged. If a read fails later, or tied tensors differ, part of the weights is loaded.
    """
    begin = time.perf_counter()
    _check_non_persistent_buffers(model)
    reader = open_checkpoint(Path(path))
    stored = reader.tensors
    wanted = [_Wanted(tensor, tuple(map(rename, tensor.names))) for tensor in model_tensors(model)]
    differences = [
        *_not_tensors(model, rename, optional),
        *(text for one in wanted for text in one.differences(stored, optional, cast=cast)),
        *_unexpected(wanted, _without_removed(stored, model, rename), ignored),
    ]
    if differences:
        shown = first_of(differences, NUM_DIFFERENCES)
        raise CheckpointError(
            f"the checkpoint does not fit the model: {shown}{_hint(wanted, stored)}"
        )
    found = [
        (one.tensor, names)
        for one in wanted
        if (names := one.found(stored)) and not one.tensor.is_computed
    ]
    device = mesh_device(model)
    return LoadReport(
        num_tensors=len(found),
        bytes_read=sum(_load(tensor, names, reader, device) for tensor, names in found),
        bytes_stored=sum(stored[names[0]].nbytes for _, names in found),
        seconds=time.perf_counter() - begin,
    )


def _check_non_persistent_buffers(model: nn.Module) -> None:
    """Check that non-persistent buffers have values, since checkpoints do not contain them."""
    needed = planned_forward(model).buffers if isinstance(model, Planned) else None
    if isinstance(model, Pipelined):
        needed = model.read_buffers
    empty = [
        name
        for name, buffer in non_persistent_buffers(model).items()
        if buffer.is_meta and (needed is None or name in needed)
    ]
    if empty:
        raise CheckpointError(
            f"checkpoints do not have the non-persistent buffer {empty[0]!r}"
            + (f" (and {len(empty) - 1} more)" if len(empty) > 1 else "")
            + ", and it is on the meta device: create the model under init_empty_weights(), "
            "which keeps the values of buffers, or assign a value to it"
        )


def _load(
    wanted: ModelTensor, names: Sequence[str], reader: CheckpointReader, device: torch.device
) -> int:
    """Fill one tensor of the model, and return the bytes read."""
    first, *others = names
    module = wanted.extra_state_of
    if module is not None:
        info = reader.tensors[first]
        state = torch.empty(info.shape, dtype=info.dtype)
        bytes_read = reader.read(first, state)
        module.set_extra_state(state)
        return bytes_read
    is_meta = wanted.is_meta
    tensor = empty_like(wanted.tensor, device) if is_meta else wanted.tensor.detach()
    bytes_read = reader.read(first, tensor)
    for other in others:
        tied = empty_like(tensor, device)
        bytes_read += reader.read(other, tied)
        # Bytes are compared, since values may be NaN.
        if not torch.equal(_bytes(tensor), _bytes(tied)):
            raise CheckpointError(
                f"{first!r} and {other!r} are tied in the model, but differ in the checkpoint"
            )
    if is_meta:
        wanted.set(tensor)
    return bytes_read


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor).reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of the model, and its names in the checkpoint."""

    tensor: ModelTensor
    names: tuple[str, ...]

    def found(self, stored: Mapping[str, TensorInfo]) -> list[str]:
        """The names that the checkpoint has."""
        return [name for name in dict.fromkeys(self.names) if name in stored]

    def differences(
        self, stored: Mapping[str, TensorInfo], optional: Collection[str], *, cast: bool
    ) -> Iterator[str]:
        """Describe the differences between checkpoint and model in this tensor."""
        tensor, names = self.tensor.tensor, self.found(stored)
        if not names:
            missing = " or ".join(map(repr, dict.fromkeys(self.names)))
            if not _any_matches(self.tensor.names, optional):
                yield f"it lacks {missing}"
            elif self.tensor.is_meta:
                yield f"it lacks {missing}, which has no values in the model either"
        if self.tensor.is_computed and not _any_matches(self.tensor.names, optional):
            yield (
                f"a hook computes {names[0]!r} for the state dict of the model, so only "
                f"model.load_state_dict can load it"
            )
        for name in names if self.tensor.attributes else ():
            shape, dtype = stored[name].shape, stored[name].dtype
            if shape != tuple(tensor.shape):
                yield f"{name!r} has shape {shape}, but {tuple(tensor.shape)} in the model"
            elif dtype != tensor.dtype and not cast:
                yield (
                    f"{name!r} is {dtype}, but {tensor.dtype} in the model (cast=True converts it)"
                )


def _not_tensors(
    model: nn.Module, rename: Callable[[str], str], optional: Collection[str]
) -> Iterator[str]:
    """Describe state of the model that is no tensor, and that checkpoints do not have."""
    for name, value in other_state(model).items():
        if not _any_matches([rename(name)], optional) and not _any_matches([name], optional):
            yield (
                f"{name!r} of the model is a {type(value).__name__}, and only tensors are loaded: "
                f"set it with set_extra_state, and pass optional=[{name!r}]"
            )


def _without_removed(
    stored: Iterable[str], model: nn.Module, rename: Callable[[str], str]
) -> list[str]:
    """Names in the checkpoint without those of tensors that other pipeline stages hold."""
    removed = set(map(rename, model.removed_names)) if isinstance(model, Pipelined) else set()
    return [name for name in stored if name not in removed]


def _unexpected(
    wanted: Sequence[_Wanted], stored: Iterable[str], ignored: Collection[str]
) -> Iterator[str]:
    known = {name for one in wanted for name in one.names}
    for name in stored:
        if name not in known and not _any_matches([name], ignored):
            yield f"the model has no {name!r}"


def _any_matches(names: Iterable[str], patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _hint(wanted: Sequence[_Wanted], stored: Collection[str]) -> str:
    """A suggestion if names differ only by a prefix."""
    name = wanted[0].tensor.names[0] if wanted else ""
    for other in stored:
        if name != other and other.endswith(f".{name}"):
            prefix = other.removesuffix(name)
            hint = f"lambda name: {prefix!r} + name"
            renamed = [[prefix + name for name in one.tensor.names] for one in wanted]
        elif name != other and name.endswith(f".{other}"):
            prefix = name.removesuffix(other)
            hint = f"lambda name: name.removeprefix({prefix!r})"
            renamed = [[name.removeprefix(prefix) for name in one.tensor.names] for one in wanted]
        else:
            continue
        if all(any(name in stored for name in names) for names in renamed):
            return f" (did you mean rename={hint}?)"
    return ""
