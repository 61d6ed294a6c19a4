"""Warnings of gathered tensors, each once, and checks of plain ones and of random numbers."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.base.quantities import format_bytes
from autoshard.errors import PlanError
from autoshard.layouts import Layout, to_placements
from autoshard.runtime.checks.agreement import digest_of, numbers_of_all_ranks
from autoshard.runtime.global_tensors.placed import Placed

_SAID: set[str] = set()
_COMPARED: set[tuple[object, ...]] = set()
_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""Folders whose code only passes a call on."""

_SAMPLES = 16
_TOLERANCE = 1e-3


def say_gathered(
    function: Callable[..., Any], num_bytes: int, mesh: DeviceMesh, *, is_state: bool
) -> None:
    """Warn, once for each function and on the first rank, that it runs on full tensors.

    Args:
        function: of torch.
        num_bytes: that a rank receives for it.
        mesh: the devices.
        is_state: True if its arguments are parameters, gradients or states of optimizers.
    """
    if not num_bytes:
        return
    packet = getattr(function, "overloadpacket", function)
    name = getattr(packet, "__name__", str(packet))
    what, remedy = (
        "result",
        (
            "make it a part of forward, or have the plan return the full tensor: "
            'Pins(outputs={"*": "I"})'
        ),
    )
    if is_state:
        what, remedy = "parameter", "pin the parameter replicated, or do it before parallelize"
    _say(
        f"{name} of a sharded {what} runs on the full tensor on every rank: it gathers "
        f"{format_bytes(num_bytes)} for each call. To avoid this, {remedy}",
        name,
        mesh,
    )


def say_moved(what: str, num_bytes: int, given: Placed, wanted: Layout) -> None:
    """Warn, once for each tensor and on the first rank, that it is resharded."""
    placements = list(to_placements(wanted, tuple(given.mesh.shape)))
    _say(
        f"{what} is a DTensor placed {list(given.placements)}, and the plan reads {placements}: "
        f"{format_bytes(num_bytes)} are gathered for each call. To avoid this, pass it so placed",
        what,
        given.mesh,
    )


def _say(text: str, key: str, mesh: DeviceMesh) -> None:
    if key not in _SAID:
        _SAID.add(key)
        if not any(mesh.get_coordinate() or ()):
            warnings.warn(text, stacklevel=_levels_to_user())


def _levels_to_user() -> int:
    """The stack level of the user's code for a warning of the caller."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001  the documented way to look at callers
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame, level = frame.f_back, level + 1
    return level


def check_plain(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], mesh: DeviceMesh
) -> None:
    """Check that plain tensors which meet sharded ones are the same on all ranks.

    They are compared once for each function and shape: integers exactly, of other numbers a sample
    to a thousandth, since ranks may add the same numbers in different orders.

    Raises:
        PlanError: they differ, on all ranks.
    """
    for tensor in tensors:
        key = (function, tuple(tensor.shape), tensor.dtype, mesh)
        if not tensor.ndim or not tensor.numel() or tensor.is_meta or key in _COMPARED:
            continue
        _COMPARED.add(key)
        found = numbers_of_all_ranks(_sketch(tensor), mesh)
        if _differ(found):
            name = getattr(function, "__name__", str(function))
            raise PlanError(
                f"a plain tensor of shape {tuple(tensor.shape)} meets a sharded result in {name}, "
                f"and differs between ranks: a plain tensor is the same whole tensor on all ranks. "
                f"If each rank has rows of its own, say so with autoshard.local(tensor, "
                f"like=result), or take them from shard_loader; if the tensor is random, seed all "
                f"ranks alike"
            )


def _differ(found: torch.Tensor) -> bool:
    """True if rows of numbers, one for each rank, are not alike."""
    if not found.is_floating_point():
        return bool((found != found[0]).any())
    scale = found.abs().nan_to_num(posinf=0.0).amax()
    return bool(((found - found[0]).abs() > _TOLERANCE * scale).any())


@torch.no_grad()
def _sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that differ if tensors do: samples of a float tensor, sums of all of an integer."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.is_floating_point():
        weights = torch.arange(1, flat.numel() + 1, device=flat.device) % _PRIME
        values = flat.to(torch.int64)
        return torch.stack([values.sum(), (values * weights).sum()])
    places = torch.linspace(0, flat.numel() - 1, _SAMPLES, device=flat.device).long()
    return flat[places].to(torch.float64)


_PRIME = 8191

_RESULT_DRAWN_DIFFERENTLY = (
    "random numbers for a sharded result differ between ranks: call torch.manual_seed with "
    "one seed on all ranks, or make the random operator a part of forward"
)


@contextmanager
def drawn_alike(mesh: DeviceMesh, message: str = _RESULT_DRAWN_DIFFERENTLY) -> Iterator[None]:
    """A context in which all ranks compute the same: what they draw must be the same as well.

    Args:
        mesh: the devices.
        message: of the error.

    Raises:
        PlanError: random numbers were drawn, of which ranks have different ones.
    """
    before = _random_state(mesh)
    yield
    if torch.equal(before, _random_state(mesh)):
        return
    if _differ(
        numbers_of_all_ranks(torch.tensor([digest_of(before)], device=mesh.device_type), mesh)
    ):
        raise PlanError(message)


def _random_state(mesh: DeviceMesh) -> torch.Tensor:
    """The state of the default generators of the CPU and of the mesh's devices."""
    state = torch.get_rng_state()
    if mesh.device_type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state()])
    return state
