"""Meshes of a number of devices, and the result of planning for one of them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isqrt

from autoshard.errors import OptionError
from autoshard.mesh import Mesh, Topology, default_axis_names, make_mesh, resolve_topology
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.plan.sub_meshes import PIPELINE_AXIS, num_pipeline_ranks

_MAX_AXES = 6
"""Maximum number of axes; the number of strategies is exponential in it."""


@dataclass(frozen=True, slots=True)
class MeshCandidate:
    """Result of planning for one mesh.

    Attributes:
        mesh: the mesh.
        options: those of its plan, which is of one stage if no axis of the mesh is for a pipeline.
        plan: its plan, a document without stages if none was found; the first one that fits if
            the search was stopped. None if the options do not fit this mesh, its plans are proven
            to be at most `relative_gap` faster than that of another mesh, or the process died.
        error: reason why `plan` is None; empty otherwise.
        bound: proven lower bound of the seconds of its plans with these options; inf if there is
            no plan, -inf if no bound is known.
        was_stopped: True if the search was stopped before the mesh was planned: `plan` is then its
            first plan, or None.
    """

    mesh: Mesh
    options: PlanOptions
    plan: Plan | None
    error: str = ""
    bound: float = -inf
    was_stopped: bool = False

    @property
    def objective(self) -> float:
        """Seconds of the plan; inf if there is none."""
        found = None if self.plan is None else self.plan.certificate.objective
        return inf if found is None else found


def candidate_meshes(
    num_devices: int,
    *,
    topology: str | Topology | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    max_axes: int = 3,
    most: int | None = None,
    options: PlanOptions | None = None,
) -> tuple[Mesh, ...]:
    """All meshes of a number of devices, in order of the number of axes.

    Axes have at least two ranks. Of meshes that differ only in the order of axes with equal sizes
    and link levels, whose costs are equal, one is returned.

    Args:
        num_devices: number of devices of each mesh.
        topology: name of a preset, or a topology; the default one if None.
        nodes: as for `make_mesh`.
        gpus_per_node: as for `make_mesh`.
        max_axes: maximum number of axes.
        most: maximum number of meshes; None for all.
        options: of planning. If they ask for pipelines, the outermost axis of a mesh is `pp`; with
            `stages` 'auto', meshes without it come first.

    Raises:
        OptionError: a number is out of its range.
        MeshError: the topology is unknown, or has fewer devices.
    """
    if num_devices < 1:
        raise OptionError(f"num_devices is {num_devices}; a mesh has 1 device or more")
    if not 1 <= max_axes <= _MAX_AXES:
        raise OptionError(f"max_axes is {max_axes}; give a number from 1 to {_MAX_AXES}")
    options = options or PlanOptions()
    resolved = resolve_topology(topology, num_devices, nodes, gpus_per_node)
    distinct: dict[object, Mesh] = {}
    for shape in _shapes(num_devices, max_axes):
        for mesh in _meshes(shape, resolved, options):
            ranks = num_pipeline_ranks(mesh)
            first = 0 if ranks is None else 1
            axes = Counter((shape[axis], mesh.spans(axis)) for axis in range(first, len(shape)))
            distinct.setdefault((ranks, frozenset(axes.items())), mesh)
        if most is not None and len(distinct) >= most:
            break
    return tuple(distinct.values())[:most]


def _meshes(shape: tuple[int, ...], topology: Topology, options: PlanOptions) -> Iterator[Mesh]:
    """The meshes of one shape: without a pipeline, and with its outermost axis for one."""
    stages = (
        len(options.pipeline.balance)
        if isinstance(options.pipeline.balance, tuple)
        else options.pipeline.stages
    )
    is_cut = (
        bool(options.pipeline.cuts)
        or options.pipeline.balance is not None
        or stages not in (None, 1)
    )
    if not is_cut or (stages == "auto" and not options.pipeline.cuts):
        yield make_mesh(shape, topology=topology)
    ranks = shape[0]
    if is_cut and ranks > 1 and (not isinstance(stages, int) or stages % ranks == 0):
        inner = default_axis_names(len(shape))[1:]
        yield make_mesh(shape, axes=(PIPELINE_AXIS, *inner), topology=topology)


def _shapes(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations into factors of 2 or more, fewest factors first; (1,) for 1."""
    yield (number,)
    small = [d for d in range(2, isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    for count in range(2, most + 1):
        yield from _factorisations(number, count, divisors)


def _factorisations(number: int, count: int, divisors: list[int]) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in divisors:
        # Each remaining factor is 2 or more.
        if first << (count - 1) > number:
            return
        if number % first == 0:
            for rest in _factorisations(number // first, count - 1, divisors):
                yield (first, *rest)
