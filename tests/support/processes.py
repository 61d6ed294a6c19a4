"""What accelerate and transformers read of a process: its place among the processes of a launch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState


@contextmanager
def launched_process() -> Iterator[None]:
    """A context with the environment that torchrun would make, or none outside of ranks."""
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        environment |= {"RANK": rank, "LOCAL_RANK": rank}
        environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    forget()
    with mock.patch.dict(os.environ, environment):
        yield
    forget()


def forget() -> None:
    """Reset what accelerate keeps in a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
