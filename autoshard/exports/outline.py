"""`Outline`: the view of a plan that exports use, with the purpose of each mesh axis."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from textwrap import wrap
from typing import Literal

from autoshard.errors import PlanError
from autoshard.graph import DType, Graph, MixedPrecision, Node, graph_from_json
from autoshard.layouts import AxisType, I, Layout
from autoshard.mesh import mesh_text
from autoshard.plan.document import Plan
from autoshard.plan.stage import PlacedInput, PlacedNode, Stage

Role = Literal["replicate", "shard", "tensor", "context"]
"""Purpose of an axis: data-parallel, with whole parameters or with shards; or another one."""


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter of one module; a tied parameter has one entry per name.

    Attributes:
        module: dotted path of its module.
        attribute: its name in the module.
        placed: its entry in the plan.
        layout: its parsed layout.
    """

    module: str
    attribute: str
    placed: PlacedInput
    layout: Layout

    @property
    def name(self) -> str:
        """Dotted name in the state dict."""
        return f"{self.module}.{self.attribute}" if self.module else self.attribute


class Outline:
    """View of a plan for exports.

    Of a pipeline, the purpose of axes is that in its first stage, and parameters are those of all
    stages.

    Args:
        plan: a plan.

    Raises:
        PlanError: the document has no plan, or stages have different sub-meshes.
    """

    def __init__(self, plan: Plan) -> None:
        if not plan.found:
            raise PlanError(f"the document has no plan to export: {plan.reason}")
        if len({stage.axes for stage in plan.stages}) > 1:
            raise PlanError('stages have different sub-meshes: plan with sub_meshes="equal"')
        self.plan = plan
        self.stage: Stage = plan.stages[0]
        self.axes = tuple(name for name, _ in self.stage.axes)
        self.sizes = tuple(size for _, size in self.stage.axes)

    @property
    def title(self) -> str:
        """Short description of plan and mesh, with the element types."""
        precision = f", {self.plan.graph.precision}" if self.plan.graph.precision else ""
        return f"plan {self.plan.id[:12]} on {mesh_text(self.plan.mesh)}{precision}"

    @property
    def policy(self) -> MixedPrecision | None:
        """The mixed-precision policy under which the program was exported."""
        return self.plan.graph.mixed_precision

    @property
    def compute_dtype(self) -> DType | None:
        """Element type of most computations: that of the policy, or of most parameters."""
        if self.policy is not None and self.policy.param_dtype is not None:
            return self.policy.param_dtype
        return self.stored_dtype

    @cached_property
    def stored_dtype(self) -> DType | None:
        """Element type in which most elements of parameters that can be trained are stored."""
        sizes: dict[DType, int] = defaultdict(int)
        for placed in self._placed:
            dtype = DType(placed.dtype)
            if dtype.is_differentiable:
                sizes[dtype] += prod(placed.shape)
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)

    @cached_property
    def graph(self) -> Graph:
        """The program that was planned."""
        return graph_from_json(self.stage.program)

    @cached_property
    def placed(self) -> dict[str, PlacedNode]:
        """The operators of the first stage with their layouts, by name."""
        return {node.name: node for node in self.stage.nodes}

    @cached_property
    def parameters(self) -> tuple[OwnedParameter, ...]:
        """Every parameter under each of its names, in the order of the program."""
        return tuple(
            OwnedParameter(*_split(name), placed=placed, layout=Layout.parse(placed.layout))
            for placed in self._placed
            for name in (placed.target, *placed.aliases)
        )

    @property
    def _placed(self) -> Iterable[PlacedInput]:
        """The parameters of all stages; the first stage that holds one counts."""
        found: dict[str, PlacedInput] = {}
        for stage in self.plan.stages:
            for placed in stage.parameters:
                found.setdefault(placed.target, placed)
        return found.values()

    @cached_property
    def readers(self) -> dict[str, tuple[Node, ...]]:
        """The operators that read each value."""
        readers: dict[str, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            for value in dict.fromkeys(node.inputs):
                readers[value].append(node)
        return {value: tuple(nodes) for value, nodes in readers.items()}

    @cached_property
    def read_elsewhere(self) -> frozenset[str]:
        """Names of parameters that are read outside of the forward of their modules.

        Hooks on a module's forward, as frameworks use them, do not apply to such code.
        """
        owners: dict[str, list[str]] = defaultdict(list)
        for parameter in self.parameters:
            owners[parameter.placed.name].append(parameter.module)
        return frozenset(
            parameter.name
            for parameter in self.parameters
            for node in self.readers.get(parameter.placed.name, ())
            if not any(_is_within(node.module, m) for m in owners[parameter.placed.name])
        )

    @cached_property
    def active(self) -> tuple[int, ...]:
        """Indices of the axes with more than one rank."""
        return tuple(axis for axis, size in enumerate(self.sizes) if size > 1)

    @cached_property
    def data_axes(self) -> tuple[int, ...]:
        """The data-parallel axes: those that shard dim 0 of all user inputs."""
        given = [i for i in self.stage.inputs if i.kind == "user" and i.shape]
        layouts = [Layout.parse(i.layout) for i in given]
        return tuple(
            axis
            for axis in self.active
            if layouts and all(layout.types[axis].dim == 0 for layout in layouts)
        )

    @cached_property
    def tensor_axis(self) -> int | None:
        """Of the axes that are not data-parallel, the one that shards most parameters."""
        return self._busiest([axis for axis in self.active if axis not in self.data_axes])

    @cached_property
    def shard_axis(self) -> int | None:
        """The data-parallel axis that shards most parameters; None if none does."""
        return self._busiest(self.data_axes)

    def _busiest(self, axes: Sequence[int]) -> int | None:
        """The axis that shards most parameter elements, the last if several; None if none does."""
        sharded = {
            axis: sum(
                prod(placed.shape)
                for placed in self._placed
                if Layout.parse(placed.layout).types[axis].is_shard
            )
            for axis in axes
        }
        best = max(axes, key=lambda axis: (sharded[axis], axis), default=None)
        return best if best is not None and sharded[best] else None

    @cached_property
    def roles(self) -> dict[Role, tuple[int, ...]]:
        """The non-trivial axes by role."""
        roles: dict[Role, tuple[int, ...]] = {}
        for axis in self.active:
            role = self._role(axis)
            roles[role] = (*roles.get(role, ()), axis)
        return roles

    def _role(self, axis: int) -> Role:
        if axis in self.data_axes:
            shards = any(p.layout.types[axis].is_shard for p in self.parameters)
            return "shard" if shards else "replicate"
        given = [Layout.parse(i.layout) for i in self.stage.inputs if i.kind == "user" and i.shape]
        along = given and all(layout.types[axis].dim == 1 for layout in given)
        return "context" if along else "tensor"

    @cached_property
    def state_axes(self) -> tuple[int, ...]:
        """The axes of data and context parallelism that shard parameters at rest."""
        axes = (*self.roles.get("shard", ()), *self.roles.get("context", ()))
        return tuple(a for a in axes if any(p.layout.types[a].is_shard for p in self.parameters))

    @cached_property
    def kept_gathered(self) -> float:
        """Share of the bytes of parameters sharded over `state_axes` that backward finds gathered.

        1 with a distributed optimizer (ZeRO-1), 0 if parameters are freed after forward (ZeRO-3).
        """
        total = kept = 0
        for parameter in self.parameters:
            if any(parameter.layout.types[axis].is_shard for axis in self.state_axes):
                size = prod(parameter.placed.shape)
                total += size
                kept += size if parameter.placed.name not in self.regathered else 0
        return kept / total if total else 0.0

    def degree(self, role: Role) -> int:
        """Product of the sizes of all axes of a role."""
        return prod(self.sizes[axis] for axis in self.roles.get(role, ()))

    def require_one_axis(self, role: Role, framework: str) -> None:
        """Check that at most one axis has a role.

        Raises:
            PlanError: several axes have it.
        """
        if len(axes := self.roles.get(role, ())) > 1:
            raise PlanError(
                f"the axes {self.named(axes)} are both for {role} parallelism, which has one "
                f"degree in {framework}; plan on a mesh with fewer axes"
            )

    @cached_property
    def regathered(self) -> frozenset[str]:
        """Values whose reshardings backward runs again."""
        numbers = {node.name: i for i, node in enumerate(self.stage.nodes)}
        inside = {
            node.name
            for checkpoint in self.stage.checkpoints
            for node in self.stage.nodes[numbers[checkpoint.first] : numbers[checkpoint.last] + 1]
        }
        return frozenset(
            resharding.value
            for resharding in self.stage.reshardings
            if resharding.regather or resharding.consumer in inside
        )

    def named(self, axes: Sequence[int]) -> str:
        """Axes by name, such as `dp, tp`."""
        return ", ".join(self.axes[axis] for axis in axes)


def _is_within(module: str, other: str) -> bool:
    return not other or module == other or module.startswith(f"{other}.")


def _split(name: str) -> tuple[str, str]:
    module, _, attribute = name.rpartition(".")
    return module, attribute


def at_rest(layout: Layout) -> Layout:
    """Replace R by I, which are placed alike in stored tensors."""
    return Layout(tuple(I if t.is_replicated else t for t in layout.types), layout.nesting)


def placement_code(axis_type: AxisType) -> str:
    """Python code of the DTensor placement of a parameter on a mesh with one axis."""
    if axis_type.is_replicated:
        return "Replicate()"
    if not axis_type.sub_shards:
        return f"Shard({axis_type.dim})"
    return f"_StridedShard({axis_type.dim}, split_factor={len(axis_type.sub_shards)})"


def in_words(layout: Layout, axes: Sequence[str]) -> str:
    """A layout in DTensor's words, one placement per axis; axes that shard one dim with order."""
    texts = []
    for axis_type in layout.types:
        if axis_type.is_replicated:
            texts.append("Replicate")
            continue
        interleaved = ", interleaved" if axis_type.sub_shards else ""
        texts.append(f"Shard({axis_type.dim}{interleaved})")
    dims = sorted({t.dim for t in layout.types if t.is_shard})
    orders = [layout.sharding_axes(dim) for dim in dims]
    nested = [f"{axes[order[-1]]} innermost" for order in orders if len(order) > 1]
    return ", ".join([f"({', '.join(texts)})", *nested])


_WIDTH = 96
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def comment(paragraphs: Iterable[str]) -> str:
    """Lines of a `#` comment, wrapped; a paragraph that begins with `- ` is an item of a list."""
    lines: list[str] = []
    for paragraph in paragraphs:
        indent = "  " if paragraph.startswith("- ") else ""
        lines += wrap(
            paragraph,
            _WIDTH,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        ) or [""]
    while lines and not lines[-1]:
        lines.pop()
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def not_expressed(outline: Outline, items: Iterable[str]) -> list[str]:
    """Paragraphs that list the parts of a plan that an export leaves out."""
    listed = [f"- {item}" for item in items]
    if outline.stage.micro_batches > 1:
        number = outline.stage.micro_batches
        what = "" if outline.plan.pipeline else f"the {number} micro-batches of a step, and "
        listed.append(
            f"- {what}which parameters stay gathered, and which gradients unreduced, between "
            f"micro-batches"
        )
    if not listed:
        return []
    return ["Not expressed:", *listed]


def folded(names: Iterable[str]) -> str:
    """Names with numbers of layers replaced by `*`, without repetition."""
    return ", ".join(dict.fromkeys(pattern(name) for name in names))


def pattern(name: str) -> str:
    """A dotted name with each component that is a number replaced by `*`."""
    return _NUMBER.sub("*", name)
