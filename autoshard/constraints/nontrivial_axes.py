"""Mesh axes of more than one rank.

Axes of size 1 shard nothing and cost nothing, so planning uses only the non-trivial axes. Layouts
in a plan have all axes; the others are added at the end, with a type that is always legal.
"""

from dataclasses import dataclass

from autoshard.layouts import AxisType, I, Layout, R
from autoshard.mesh import Mesh


@dataclass(frozen=True)
class NontrivialAxes:
    """The axes of a mesh that have more than one rank; a `Pricer` of collectives over them.

    Attributes:
        mesh: the whole mesh.
        axes: index of each non-trivial axis in the mesh.
    """

    mesh: Mesh
    axes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "NontrivialAxes":
        """The non-trivial axes of a mesh."""
        return cls(mesh, tuple(i for i, size in enumerate(mesh.axis_sizes) if size > 1))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each non-trivial axis."""
        return tuple(self.mesh.axis_sizes[axis] for axis in self.axes)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Adjacent non-trivial axes that can communicate as one group."""
        return tuple(
            tuple(self.axes.index(axis) for axis in group) for group in self.mesh.axis_groups
        )

    def name(self, axis: int) -> str:
        """Name of a non-trivial axis."""
        return self.mesh.axis_names[self.axes[axis]]

    def collective_time(
        self, action: str, axis: int | tuple[int, ...], nbytes: int, *, inner: bool = False
    ) -> float:
        """Seconds of a collective over a non-trivial axis, or over several as one group."""
        axes = (axis,) if isinstance(axis, int) else axis
        whole = tuple(self.axes[a] for a in axes)
        return self.mesh.collective_time(action, whole, nbytes, inner=inner)

    def copy_time(self, nbytes: int) -> float:
        """Seconds of a local copy."""
        return self.mesh.copy_time(nbytes)

    def widen(self, layout: Layout, *, differentiable: bool) -> Layout:
        """The layout over the whole mesh of a layout over the non-trivial axes."""
        types: list[AxisType] = [I if differentiable else R] * len(self.mesh.axis_sizes)
        for axis, axis_type in zip(self.axes, layout.types, strict=True):
            types[axis] = axis_type
        nesting = tuple(tuple(self.axes[a] for a in order) for order in layout.nesting)
        return Layout(tuple(types), nesting)

    def narrow(self, layout: Layout) -> Layout:
        """The layout over the non-trivial axes of a layout over the whole mesh."""
        number = {axis: i for i, axis in enumerate(self.axes)}
        types = [layout.types[axis] for axis in self.axes]
        order = [number[a] for o in layout.nesting for a in o if a in number]
        return Layout.nested(types, [*order, *(a for a in range(len(types)) if a not in order)])
