"""Solutions of MASE: placements of each node of its graph, and the pins that follow from them.

The formats are those of MASE's `autosharding.py` (`_export_solution`, `_import_solution`). Each
weight is a node, named like its parameter with `_` for `.`, and its placements are those of the
result `data_out_0`. An operator has its inputs as `data_in_0`, `data_in_1` and so on, and weights
under the names that their module gives them. Names of operators depend on how MASE traced the
model: those of the export are written, and those of modules with weights; only weights and inputs
are read.

The file `ilp_solution.pkl` is a pickle, which can run any code when it is loaded. It is read only
if the user trusts the file explicitly, by an unpickler that accepts DTensor placements and plain
containers only; a malicious file can still exhaust memory. MASE writes with dill, which produces
plain pickles for such contents.
"""

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autoshard.base.files import read_file
from autoshard.errors import LayoutError, OptionError, PlanError
from autoshard.graph import Graph, InputKind, graph_from_json
from autoshard.layouts import (
    Layout,
    has_placements,
    layout_of_texts,
    placement_texts,
    to_placements,
)
from autoshard.plan import Pins, Plan, Stage, only_stage

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


Placements = tuple[str, ...]
"""Texts of DTensor placements, one per mesh axis."""

RESULT = "data_out_0"
_OTHERS = re.compile(r"\W")
_LAYER = re.compile(r"_\d+(?=_|$)")


@dataclass(frozen=True, slots=True)
class MaseNode:
    """A node of a solution.

    Attributes:
        args: placements of the inputs, by MASE's name of the argument.
        results: placements of the outputs, by MASE's name of the result.
    """

    args: Mapping[str, Placements] = field(default_factory=dict)
    results: Mapping[str, Placements] = field(default_factory=dict)


MaseSolution = Mapping[str, MaseNode]
"""Nodes by MASE's name."""


def node_name(target: str) -> str:
    """Name that torch.fx gives to the node of a weight."""
    return _OTHERS.sub("_", target)


def solution_of_plan(plan: Plan) -> dict[str, MaseNode]:
    """Convert a plan to a solution; tied weights under all their names.

    Raises:
        PlanError: the document has no plan, or the plan is a pipeline, which MASE has not.
    """
    stage = only_stage(plan, "a solution of MASE")
    weights = {
        node_name(name): MaseNode(results={RESULT: placed.placements})
        for placed in stage.inputs
        for name in (placed.target, *placed.aliases)
    }
    return {**_operators(stage, plan.mesh.axis_sizes), **weights}


def _operators(stage: Stage, axis_sizes: tuple[int, ...]) -> dict[str, MaseNode]:
    """The operators of a stage, and the modules whose operators read weights of their own."""
    graph = graph_from_json(stage.program)
    stored = (InputKind.PARAMETER, InputKind.BUFFER)
    targets = {i.name: i.target for i in graph.inputs if i.kind in stored}
    operators: dict[str, MaseNode] = {}
    of_modules: dict[str, list[MaseNode]] = {}
    holding = set[str]()
    for placed in stage.nodes:
        node = graph.nodes[graph.numbers[placed.name]]
        paths = [targets.get(value, "") for value in node.inputs]
        data = (f"data_in_{number}" for number in count())
        names = [path.rpartition(".")[2] or next(data) for path in paths]
        results = [f"data_out_{number}" for number in range(len(node.outputs))]
        operators[node.name] = MaseNode(
            _placed(names, placed.inputs, axis_sizes), _placed(results, placed.outputs, axis_sizes)
        )
        of_modules.setdefault(node.module, []).append(operators[node.name])
        holding |= {node.module} & {path.rpartition(".")[0] for path in paths if path}
    return operators | {
        node_name(path): MaseNode(_arguments(of_modules[path]), of_modules[path][-1].results)
        for path in sorted(holding - {""})
    }


def _placed(
    names: Sequence[str], layouts: Sequence[str], axis_sizes: tuple[int, ...]
) -> dict[str, Placements]:
    """Placements by name, of the layouts that DTensor can express."""
    parsed = {name: Layout.parse(text) for name, text in zip(names, layouts, strict=True)}
    return {
        name: placement_texts(layout, axis_sizes)
        for name, layout in parsed.items()
        if has_placements(layout)
    }


def _arguments(operators: Sequence[MaseNode]) -> dict[str, Placements]:
    """The inputs of the first operator of a module, and the weights of all."""
    weights = {
        name: placements
        for operator in operators
        for name, placements in operator.args.items()
        if not name.startswith("data_in_")
    }
    return {**operators[0].args, **weights}


def extrapolated(solution: MaseSolution, names: Iterable[str]) -> dict[str, MaseNode]:
    """Extend a solution: missing nodes of later layers get the placements of the first layer.

    As in MASE, the layer is the first number in a name; a missing name gets the placements of the
    name with 0 for that number, if there is such a node.

    Args:
        solution: solution of at least the first layer.
        names: names of the required nodes.
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
    """Convert a solution to pins for the weights and inputs of a program.

    Args:
        solution: solution of MASE.
        graph: the program to plan.
        axis_sizes: sizes of the axes of the mesh to plan on.
        extrapolate: True to use the first layer's placements for layers that are missing.

    Raises:
        PlanError: the solution has no weight or input of the program, or has placements for
            another number of mesh axes, or placements that no layout can express.
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
            f"the solution places {name!r} on {len(placements)} axes, but the mesh has "
            f"{len(axis_sizes)}; plan on the mesh that the solution is for"
        )
    try:
        return layout_of_texts(placements, axis_sizes)
    except LayoutError as error:
        raise PlanError(f"the solution has unsupported placements of {name!r}: {error}") from None


_MODULES: Final = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",  # before torch 2.5
)
_CLASSES: Final = ("Shard", "Replicate", "Partial", "_StridedShard")


class _Placements(pickle.Unpickler):
    """Unpickler that accepts only placements in plain containers."""

    def find_class(self, module: str, name: str) -> type:
        if module not in _MODULES or name not in _CLASSES:
            raise PlanError(
                f"the file refers to {module}.{name}, which is not allowed in a solution of MASE; "
                f"it was not run"
            )
        from torch.distributed.tensor import placement_types  # noqa: PLC0415  torch is slow

        found: type = getattr(placement_types, name)
        return found


def read_solution(path: Path, *, trust_pickle: bool) -> dict[str, MaseNode]:
    """Read a solution that MASE wrote on this machine.

    Args:
        path: a local file.
        trust_pickle: True if the user trusts the source of the file.

    Raises:
        OptionError: the file is not trusted.
        PlanError: the file is not a solution, or refers to disallowed objects.
    """
    if not trust_pickle:
        raise OptionError(
            f"{path} is a pickle, which can run arbitrary code; if you trust its source, "
            f"use --trust-pickle, or trust_pickle=True"
        )
    with BytesIO(read_file(path, PlanError)) as file:
        try:
            document = _Placements(file).load()
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        except Exception as error:  # noqa: BLE001  a broken pickle raises anything
            raise PlanError(f"{path} is not a pickle of a solution: {error}") from None
    try:
        return {
            str(name): MaseNode(_side(node.get("args", {})), _side(node.get("results", {})))
            for name, node in document.items()
        }
    except (AttributeError, TypeError) as error:
        raise PlanError(f"{path} is not a solution of MASE: {error}") from None


def _side(placed: dict[str, Iterable["Placement"]]) -> dict[str, Placements]:
    return {str(name): tuple(map(repr, placements)) for name, placements in placed.items()}


def write_solution(solution: MaseSolution, path: Path, axis_sizes: tuple[int, ...]) -> None:
    """Write a solution for MASE.

    Args:
        solution: placements by node.
        path: path of the new file.
        axis_sizes: sizes of the axes of its mesh.
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
