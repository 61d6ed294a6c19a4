"""Functions of torch on tensors that ranks share, compared with one device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.comparison import close, mesh_of_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.layouts import Layout, to_placements
from autoshard.runtime import full_tensor
from autoshard.runtime.global_tensors.dtensor_handlers import install_dtensor_handlers
from autoshard.runtime.global_tensors.dtensors import from_local
from autoshard.runtime.global_tensors.global_tensor import GlobalTensor
from autoshard.runtime.global_tensors.placed import Placed

EXACT = 1e-10


@dataclass(frozen=True)
class Sharing:
    """How ranks share a tensor.

    Attributes:
        mesh: sizes of the axes.
        layout: of the tensor.
        shape: global shape.
    """

    mesh: tuple[int, ...]
    layout: str
    shape: tuple[int, ...] = (8, 16)

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.mesh))
        return f"{'x'.join(map(str, self.shape))} {self.layout} on {sizes}"

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh on this process group; DTensors on it are those of a planned model."""
        mesh = mesh_of_ranks(self.mesh, tuple("ab"[: len(self.mesh)]))
        install_dtensor_handlers(mesh)
        return mesh

    def part(self, full: torch.Tensor) -> Placed:
        """This rank's part of a tensor; gradients flow into the whole."""
        return Placed.plain(full, self.device_mesh).resharded(Layout.parse(self.layout))

    def result(self, full: torch.Tensor) -> GlobalTensor:
        """A tensor as a planned model returns it."""
        part = self.part(full)
        return GlobalTensor.shared(part.local, part.mesh, part.placements, part.shape)

    def parameter(self, full: torch.Tensor) -> torch.nn.Parameter:
        """A tensor as a planned model stores it."""
        part = self.part(full.detach().clone())
        placements = to_placements(part.layout, self.mesh)
        return torch.nn.Parameter(from_local(part.local, part.mesh, placements, part.shape))


SHARINGS: Sequence[Sharing] = (
    Sharing((4,), "S(0)"),
    Sharing((4,), "S(1)"),
    Sharing((4,), "S(0)", (7, 16)),
    Sharing((4,), "S(1)", (8, 10)),
    Sharing((4,), "S(1)/1+1"),
    Sharing((2, 2), "S(0),I"),
    Sharing((2, 2), "S(0),S(1)"),
    Sharing((2, 2), "S(0),S(0)"),
    Sharing((2, 2), "S(0),S(0);1>0"),
    Sharing((2, 2), "S(1),S(0)", (7, 16)),
    Sharing((2, 2), "S(1),S(1)"),
    Sharing((2, 2), "I,I"),
)
"""Matrices: even, uneven and interleaved shards, one dim by two axes in both orders of nesting."""

Values = tuple[list[Any], Mapping[str, torch.Tensor | None]]


def values(found: object, leaves: Mapping[str, torch.Tensor]) -> Values:
    """Full results of a function, and the full gradients of a weighted sum of them."""
    results = [full_tensor(x) for x in pytree.tree_leaves(found)]
    total = torch.zeros((), dtype=torch.float64)
    torch.manual_seed(1)
    for x in results:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            total = total + (x * torch.randn(x.shape, dtype=torch.float64)).sum()
    if total.requires_grad:
        total.backward()
    gradients = {name: full_tensor(leaf.grad) for name, leaf in leaves.items()}
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in results], gradients


def compare(name: str, found: Values, expected: Values) -> None:
    """Check that results and gradients are equal; element types and shapes as well."""
    assert len(found[0]) == len(expected[0]), name
    for one, other in zip(found[0], expected[0], strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other or abs(one - other) < EXACT * abs(other), (name, one, other)
            continue
        assert not isinstance(one, DTensor), name
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        if other.is_floating_point():
            close(one, other, name, EXACT)
        else:
            assert torch.equal(one, other), name
    for leaf, gradient in expected[1].items():
        own = found[1][leaf]
        assert (own is None) == (gradient is None), f"{name}: gradient of {leaf}"
        if gradient is not None and own is not None:
            close(own, gradient, f"{name}: gradient of {leaf}", EXACT)


def errors(cases: Mapping[str, Callable[[], None]]) -> None:
    """Run all cases, and raise one error that names those which failed."""
    failed = []
    for name, case in cases.items():
        try:
            case()
        except AssertionError as error:
            failed.append(f"{name}: {str(error).strip().splitlines()[0]}")
    assert not failed, "\n".join(failed)
