"""Collectives as the runtime runs them, over sizes."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import gcd

import torch
from spmd_types import redistribute  # type: ignore[attr-defined]  # exported without __all__
from spmd_types import types as spmd
from torch.distributed import ProcessGroup

from autoshard.mesh.calibration import CollectiveSample
from autoshard.mesh.topology import INNER, MEASURABLE
from autoshard.runtime.calibration.stopwatch import Stopwatch
from autoshard.runtime.local_node import exchange_edges

_TYPES = {
    "all_gather": (spmd.S(0), spmd.R),
    "all_reduce": (spmd.P, spmd.R),
    "all_to_all": (spmd.S(0), spmd.S(1)),
    "reduce_scatter": (spmd.P, spmd.S(0)),
    f"all_gather{INNER}": (spmd.S(1), spmd.R),
    f"reduce_scatter{INNER}": (spmd.P, spmd.S(1)),
}
"""What a tensor is before and after; edges are exchanged with no type changed."""

_WIDTH = 64
"""Elements of a row that a rank has, at most."""


def measure_collectives(
    group: ProcessGroup,
    level: int,
    sizes: Iterable[int],
    stopwatch: Stopwatch,
) -> Iterator[CollectiveSample]:
    """Each collective over the groups of one axis, all of them at the same time.

    Args:
        group: this rank's group.
        level: number of the link level that it crosses.
        sizes: bytes of the larger of a rank's tensor before and after; rounded up to what the
            ranks can share.
        stopwatch: measures, on the device that a rank runs on.
    """
    num_ranks = group.size()
    for nbytes in sizes:
        measured = shared_size(nbytes, num_ranks)
        units = measured // (num_ranks * num_ranks * torch.float32.itemsize)
        # As wide as activations are, so that copies of slices do not move single elements.
        width = gcd(units, _WIDTH)
        shape = num_ranks * units // width, num_ranks * width
        for action in MEASURABLE:
            cut = _gathered_dim(action)
            own = [size // num_ranks if dim == cut else size for dim, size in enumerate(shape)]
            tensor = torch.ones(own, device=stopwatch.device)
            with torch.no_grad():
                seconds = stopwatch.measure(_run(action, tensor, group))
            yield CollectiveSample(action, level, num_ranks, measured, seconds)


def _run(action: str, tensor: torch.Tensor, group: ProcessGroup) -> Callable[[], object]:
    """What runs a collective; in a halo exchange a rank sends a half to either side."""
    if action in _TYPES:
        before, after = _TYPES[action]
        return partial(redistribute, tensor, group, src=before, dst=after)
    if group.size() == 2:  # noqa: PLR2004  each rank has one neighbour
        return partial(exchange_edges, tensor, tensor, group)
    to_before, to_after = torch.tensor_split(tensor, 2)
    return partial(exchange_edges, to_before, to_after, group)


def _gathered_dim(action: str) -> int | None:
    """The dim of which a rank has a slice before, and all afterwards."""
    if not action.startswith("all_gather"):
        return None
    return 1 if action.endswith(INNER) else 0


def shared_size(nbytes: int, num_ranks: int) -> int:
    """Bytes, rounded up to a matrix whose rows and columns so many ranks can share."""
    unit = num_ranks * num_ranks * torch.float32.itemsize
    return -(-nbytes // unit) * unit
