"""Checks of parameters and arguments: what would silently give other numbers is an error.

A program takes the same batch on all ranks. `autoshard.runtime.python_state` checks everything else
that forward reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.layouts import Layout, to_placements
from autoshard.plan import PlacedInput
from autoshard.runtime.checks.agreement import digest_of, numbers_of_all_ranks
from autoshard.torch_private import is_transformed, spec_of


class ParameterCheck:
    """Compares the parameters that a program reads with those that it was planned for.

    Args:
        placed: the planned parameters, by slot.
        frozen: slots of those for which the plan computes no gradient.
    """

    def __init__(self, placed: Mapping[int, PlacedInput], frozen: frozenset[int]) -> None:
        self._placed = placed
        self._frozen = frozen
        self._known: dict[int, object] = {}  # the specification of each one that was checked

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterCheck":
        """Copy nothing that is known: it has the mesh, which cannot be copied."""
        return ParameterCheck(self._placed, self._frozen)

    def check(self, slots: Sequence[int], parameters: Sequence[DTensor]) -> None:
        """Check parameters before a call.

        Args:
            slots: of the parameters.
            parameters: as they are now.

        Raises:
            PlanError: one has another dtype or other placements than the plan, or requires a
                gradient that the plan does not compute.
        """
        known = self._known
        for slot, parameter in zip(slots, parameters, strict=True):
            spec = spec_of(parameter)
            if known.get(slot) is not spec:
                _check_stored(parameter, self._placed[slot])
                known[slot] = spec
        if self._frozen and torch.is_grad_enabled():
            for slot, parameter in zip(slots, parameters, strict=True):
                if slot in self._frozen and parameter.requires_grad:
                    raise PlanError(
                        f"parameter {self._placed[slot].target!r} requires a gradient now; the "
                        f"plan was made from an export in which it was frozen, and does not "
                        f"compute it: export and plan with all parameters that are ever trained, "
                        f"and freeze some afterwards"
                    )


def _check_stored(parameter: DTensor, placed: PlacedInput) -> None:
    name = placed.target
    if parameter.dtype != getattr(torch, placed.dtype):
        raise PlanError(
            f"parameter {name!r} is {parameter.dtype} now, and the plan is for {placed.dtype}: "
            f"convert the model first, then export and plan"
        )
    sizes = tuple(parameter.device_mesh.shape)
    wanted = to_placements(Layout.parse(placed.layout), sizes)
    if parameter.placements != wanted:
        raise PlanError(
            f"parameter {name!r} is placed {parameter.placements} now, and the plan stores it as "
            f"{wanted}: assign a DTensor with these placements, or copy into the parameter"
        )


Region = tuple[str, torch.Tensor, str]
"""An argument: its name, the tensor, and which part of the global tensor it is, as text."""


def check_no_transform() -> None:
    """Check that no transform of `torch.func` is active.

    Raises:
        PlanError: one is; its tensors have no memory that a collective could send.
    """
    if is_transformed():
        raise PlanError(
            "a planned model does not run under transforms of torch.func (vmap, grad, vjp, jvp): "
            "use loss.backward() or torch.autograd.grad, and a batch dim of forward"
        )


def compare_over_ranks(regions: Sequence[Region], mesh: DeviceMesh) -> None:
    """Check that tensors which should be equal on several ranks are equal.

    Each rank hashes its tensors, and the hashes are gathered over every axis of the mesh.

    Args:
        regions: the tensors that a caller passes; ranks with the same part need the same contents.
        mesh: of the plan.

    Raises:
        PlanError: two ranks differ, on all ranks alike; the message names the argument.
    """
    own = [number for _, tensor, part in regions for number in (digest_of(part), digest_of(tensor))]
    found = numbers_of_all_ranks(
        torch.tensor(own, dtype=torch.int64, device=mesh.device_type), mesh
    ).tolist()
    by_rank = [list(zip(x[::2], x[1::2], strict=True)) for x in found]
    for number, (name, _, _) in enumerate(regions):
        _compare(name, [ranks[number] for ranks in by_rank], mesh.mesh.flatten().tolist())


def _compare(name: str, found: Iterable[Sequence[int]], ranks: Sequence[int]) -> None:
    first: dict[int, tuple[int, int]] = {}
    for rank, (part, contents) in zip(ranks, found, strict=True):
        other, known = first.setdefault(part, (rank, contents))
        if contents != known:
            raise PlanError(
                f"argument {name!r} differs between ranks {other} and {rank}, which the plan gives "
                f"the same part of the batch: pass the same global batch on all ranks, let "
                f"shard_loader(loader, model) pick the rows of each rank instead of a "
                f"DistributedSampler, or make a rank's own rows a DTensor with DTensor.from_local"
            )
