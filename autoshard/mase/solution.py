"""A solution of MASE: how each node of its graph is placed, and what that says of a program.

The formats are those of MASE's `autosharding.py` (`_export_solution`, `_import_solution`). A
weight is a node of its own there, named as its parameter with `_` for `.`, and its placements
are those of the result `data_out_0`. Names of operators depend on how MASE traced the model, so
only weights and inputs are understood here.

The file `ilp_solution.pkl` is a pickle: whoever wrote it decides which functions run when it is
read. It is read only from a file that the user names and vouches for, by an unpickler that
knows DTensor's placements and plain containers and refuses everything else; a file can still be
made to exhaust the memory. MASE writes with dill, whose files are plain pickles as long as they
hold nothing else, and reads what is written here.
"""

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autoshard.errors import LayoutError, OptionError, PlanError
from autoshard.graph import Graph
from autoshard.layouts import Layout, layout_of_texts, to_placements
from autoshard.plan import Pins, Plan

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


Placements = tuple[str, ...]
"""DTensor's placements as text, one per axis of the mesh."""

RESULT = "data_out_0"
_OTHERS = re.compile(r"\W")
_LAYER = re.compile(r"_\d+(?=_|$)")


@dataclass(frozen=True, slots=True)
class MaseNode:
    """A node of a solution.

    Attributes:
        args: placements of what it takes, by MASE's name of the argument.
        results: placements of what it makes.
    """

    args: Mapping[str, Placements] = field(default_factory=dict)
    results: Mapping[str, Placements] = field(default_factory=dict)


MaseSolution = Mapping[str, MaseNode]
"""Nodes by MASE's name of them."""


def node_name(target: str) -> str:
    """The name that torch.fx gives to the node of a weight."""
    return _OTHERS.sub("_", target)


def solution_of_plan(plan: Plan) -> dict[str, MaseNode]:
    """The weights and inputs of a plan as a solution; tied weights under each of their names.

    Raises:
        PlanError: the plan found nothing.
    """
    if not plan.found:
        raise PlanError(f"the document has no plan to write: {plan.reason}")
    return {
        node_name(name): MaseNode(results={RESULT: placed.placements})
        for stage in plan.stages
        for placed in stage.inputs
        for name in (placed.target, *placed.aliases)
    }


def extrapolated(solution: MaseSolution, names: Iterable[str]) -> dict[str, MaseNode]:
    """A solution with more nodes: those of later layers are placed as the first layer's.

    As in MASE, the layer is the first number in a name, and a name that is not there gets what
    is known of the name with 0 for that number, if anything is.

    Args:
        solution: of at least the first layer.
        names: of the nodes that are wanted.
    """
    found = dict(solution)
    for name in names:
        first = _LAYER.sub("_0", name, count=1)
        if name not in found and first in solution:
            found[name] = solution[first]
    return found


def pins_of_solution(
    solution: MaseSolution, graph: Graph, axis_sizes: tuple[int, ...], *, extrapolate: bool = True
) -> Pins:
    """Pins for the weights and inputs of a program that lie as a solution says.

    Args:
        solution: as MASE made it.
        graph: the program to plan.
        axis_sizes: of the mesh to plan on.
        extrapolate: whether later layers follow the first where the solution lacks them.

    Raises:
        PlanError: the solution names no weight or input of the program, or places one on a mesh
            with another number of axes, or as no layout can.
    """
    wanted = {
        node_name(name): (placed.kind, placed.target)
        for placed in graph.inputs
        for name in (placed.target, *placed.aliases)
        if placed.kind in ("parameter", "user")
    }
    nodes = extrapolated(solution, wanted) if extrapolate else dict(solution)
    pins: dict[str, dict[str, str]] = {"parameter": {}, "user": {}}
    for name, (kind, target) in wanted.items():
        if name in nodes and RESULT in nodes[name].results:
            layout = _layout(name, nodes[name].results[RESULT], axis_sizes)
            pins[kind][target] = str(layout)
    if not any(pins.values()):
        raise PlanError(
            f"the solution has {len(solution)} nodes, and none is a weight or an input of the "
            f"graph, whose weights would be nodes such as {next(iter(wanted), '')!r}"
        )
    return Pins(parameters=pins["parameter"], inputs=pins["user"])


def _layout(name: str, placements: Placements, axis_sizes: tuple[int, ...]) -> Layout:
    if len(placements) != len(axis_sizes):
        raise PlanError(
            f"the solution places {name!r} on {len(placements)} axes, the mesh has "
            f"{len(axis_sizes)}; plan on the mesh that the solution is for"
        )
    try:
        return layout_of_texts(placements, axis_sizes)
    except LayoutError as error:
        raise PlanError(f"the solution places {name!r} as no weight can lie: {error}") from None


_MODULES: Final = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",  # where torch had them before 2.5
)
_CLASSES: Final = ("Shard", "Replicate", "Partial", "_StridedShard")


class _Placements(pickle.Unpickler):
    """Reads pickles of placements in plain containers."""

    def find_class(self, module: str, name: str) -> type:
        if module not in _MODULES or name not in _CLASSES:
            raise PlanError(
                f"the file names {module}.{name}, which has no place in a solution of MASE; it was "
                f"not run"
            )
        from torch.distributed.tensor import placement_types  # noqa: PLC0415  torch is slow

        found: type = getattr(placement_types, name)
        return found


def read_solution(path: Path, *, trust_pickle: bool) -> dict[str, MaseNode]:
    """Read a solution that MASE wrote on this machine.

    Args:
        path: of a local file.
        trust_pickle: that the user knows where the file comes from, and asks for it to be read.

    Raises:
        OptionError: it is not trusted.
        PlanError: it is no solution, or names what has no place in one.
    """
    if not trust_pickle:
        raise OptionError(
            f"{path} is a pickle, which can run whatever its author wants; if you made it "
            f"yourself, say so with --trust-pickle"
        )
    with path.open("rb") as file:
        try:
            document = _Placements(file).load()
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        except Exception as error:  # noqa: BLE001  a broken pickle raises anything
            raise PlanError(f"{path} is no pickle of a solution: {error}") from None
    try:
        return {
            str(name): MaseNode(_side(node.get("args", {})), _side(node.get("results", {})))
            for name, node in document.items()
        }
    except (AttributeError, TypeError) as error:
        raise PlanError(f"{path} is no solution of MASE: {error}") from None


def _side(placed: dict[str, Iterable["Placement"]]) -> dict[str, Placements]:
    return {str(name): tuple(map(repr, placements)) for name, placements in placed.items()}


def write_solution(solution: MaseSolution, path: Path, axis_sizes: tuple[int, ...]) -> None:
    """Write a solution for MASE.

    Args:
        solution: placements by node.
        path: of the file.
        axis_sizes: of the mesh that it is for.
    """

    def placed(side: Any) -> dict[str, tuple["Placement", ...]]:
        return {
            name: to_placements(layout_of_texts(texts, axis_sizes), axis_sizes)
            for name, texts in side.items()
        }

    document = {
        name: {"args": placed(node.args), "results": placed(node.results)}
        for name, node in solution.items()
    }
    path.write_bytes(pickle.dumps(document))
