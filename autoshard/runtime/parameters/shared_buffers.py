"""Buffers that a model has under several names, or in plain objects as well: they stay one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autoshard.graph.export.held_state import HeldState
from autoshard.torch_private import own_buffers


@contextmanager
def shared_buffers_kept(model: nn.Module) -> Iterator[None]:
    """A context that replaces buffers under the names of a plan; the others then follow.

    A plan has one name of each buffer. What replaces it, such as the shard of a rank, or None on
    the ranks of other pipeline stages, replaces it under its other names too.

    Args:
        model: the model.
    """
    places: dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                places.setdefault(id(buffer), (buffer, []))[1].append((module, name))
    held = HeldState(model)
    yield
    for buffer, names in places.values():
        now = [own_buffers(module)[name] for module, name in names]
        for other in [one for one in now if one is not buffer][:1]:
            for module, name in names:
                setattr(module, name, other)
    held.follow()
