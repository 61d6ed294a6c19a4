"""Models on ranks of the job that are not part of the mesh of a plan with stages."""

import warnings
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch import nn

from autoshard.runtime.model_class import NotPickled, class_as_before

ModelT = TypeVar("ModelT", bound=nn.Module)


class Idle(NotPickled):
    """Mixin class of models without a stage: a step does nothing."""

    def step(self, *_: Any, return_outputs: bool = False, **__: Any) -> Any:
        """Return None in place of the loss, and of the result if it is asked for."""
        return (None, None) if return_outputs else None

    def forward(self, *_: Any, **__: Any) -> None:
        """Return None in place of the result."""

    def __len__(self) -> int:
        """Number of stages of this rank."""
        return 0

    def __getitem__(self, index: int) -> NoReturn:
        """Raise IndexError: there are no stages."""
        raise IndexError(index)

    def __iter__(self) -> Iterator[NoReturn]:
        """The stages of this rank."""
        return iter(())


def without_stages(model: ModelT) -> ModelT:
    """Free the parameters and buffers of a model on a rank that has no stage, with a warning."""
    warnings.warn(
        f"rank {dist.get_rank()} is not part of the device mesh of the pipeline: it has no stage, "
        f"and a step returns None; leave optimizer and checkpoints out where len(model) is 0",
        stacklevel=5,
    )
    for module in model.modules():
        for name, _ in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, name, None)
        for name, _ in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, None)
    model.__class__ = class_as_before(Idle, type(model), type(model).forward)
    vars(model).pop("forward", None)
    return model
