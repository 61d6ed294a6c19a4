"""What ranks of one test share."""

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import rmtree
from tempfile import mkdtemp

import torch.distributed as dist


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks know, until they are done with it."""
    name = [mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    (folder,) = name
    assert folder is not None
    yield folder
    dist.barrier()
    if dist.get_rank() == 0:
        rmtree(folder)
