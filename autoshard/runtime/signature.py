"""Conversion between the arguments and results of forward and the flat tensors of a program."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import Signature
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.graph import Graph, InputKind
from autoshard.layouts import I, Layout, to_placements
from autoshard.plan import PlacedInput, Stage
from autoshard.runtime.checks.call_structure import CallStructure, read_spec
from autoshard.runtime.global_tensors.checks import say_moved
from autoshard.runtime.global_tensors.dtensors import full_tensor
from autoshard.runtime.global_tensors.global_tensor import GlobalTensor
from autoshard.runtime.global_tensors.origins import fresh
from autoshard.runtime.global_tensors.placed import Placed
from autoshard.runtime.parameters.parameters import shown
from autoshard.runtime.program.local_node import Place
from autoshard.runtime.shards import local_shard
from autoshard.torch_private import pytree, version_counter


class ShapeError(PlanError):
    """Tensors of a call have other shapes than the plan.

    Args:
        reason: says which.
        may_be_dynamic: False if the export has dynamic sizes already, which do not help.

    Attributes:
        reason: as given; the message adds the ways out.
    """

    def __init__(self, reason: str, *, may_be_dynamic: bool = True) -> None:
        self.reason = reason
        dynamic = "export with dynamic_shapes, " if may_be_dynamic else ""
        super().__init__(
            f"{reason}: leave the last smaller batch out (drop_last=True), pad it, {dynamic}or "
            f"make a plan for these shapes too"
        )


class Arguments:
    """Checks and shards the arguments of forward.

    Args:
        stage: has the layout of each tensor.
        graph: has the structure of the arguments, and the literals among them.
        place: position of this rank on the mesh.
        mesh: the devices.
        signature: signature of the model's forward, without `self`; None if unknown.
    """

    def __init__(
        self,
        stage: Stage,
        graph: Graph,
        place: Place,
        mesh: DeviceMesh,
        signature: Signature | None = None,
    ) -> None:
        kinds = (InputKind.USER, InputKind.LITERAL)
        self._inputs = tuple(i for i in graph.inputs if i.kind in kinds)
        targets = [i.target for i in self._inputs]
        self._structure = CallStructure(targets, graph.in_spec, signature)
        placed = {i.name: i for i in stage.inputs if i.kind == "user"}
        self._slots = {i.name: slot for slot, i in enumerate(stage.inputs)}
        self._overwritten = [n for n, i in enumerate(self._inputs) if i.overwritten]
        self._tensors = {
            name: _TensorArgument(
                tensor,
                place,
                mesh,
                takes_gradient=graph.values[name].requires_grad,
                fixed_sizes=graph.fixed_sizes,
            )
            for name, tensor in placed.items()
        }
        self._passed: dict[str, tuple[ReferenceType[torch.Tensor], int]] = {}
        self._linear_sizes = (
            {name: graph.dynamic.sizes_of(name) for name in placed} if graph.dynamic else {}
        )

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors and literals that forward takes."""
        return frozenset(i.target for i in self._inputs)

    def localize(self, leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
        """This rank's shards of the tensor arguments, by their positions in the stage's inputs.

        Args:
            leaves: the arguments, from `flatten`.

        Raises:
            PlanError: a literal has another value than at export, or a tensor does not have the
                planned dtype or placements.
            ShapeError: a tensor does not have a planned shape.
        """
        tensors = {}
        for graph_input, leaf in zip(self._inputs, leaves, strict=True):
            if graph_input.kind is InputKind.USER:
                name = graph_input.name
                tensors[self._slots[name]] = self._tensors[name].localize(leaf)
            else:
                check_literal(graph_input.target, graph_input.literal, leaf)
        return tensors

    def check(self, leaves: Sequence[Any]) -> None:
        """Check literals, dtypes and shapes of the arguments, from `flatten`.

        Raises:
            PlanError: one does not fit the program.
        """
        for graph_input, leaf in zip(self._inputs, leaves, strict=True):
            name = graph_input.name
            if graph_input.kind is InputKind.USER:
                self._tensors[name].check(leaf, any_shape=bool(self._linear_sizes.get(name)))
            else:
                check_literal(graph_input.target, graph_input.literal, leaf)

    def sizes(self, leaves: Sequence[Any]) -> dict[str, int]:
        """The dynamic sizes by symbol; empty if they are the planned ones.

        Args:
            leaves: the arguments, from `flatten`. Tensors of other sizes than planned must be
                full ones or DTensors.

        Raises:
            PlanError: two tensors have different sizes for one symbol.
            ShapeError: a size is no multiple of what it must be one of.
        """
        if not self._linear_sizes:
            return {}
        given = {i.name: x for i, x in zip(self._inputs, leaves, strict=True)}
        tensors = {name: given[name] for name in self._tensors}
        tensors = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        if all(self._tensors[name].fits(x.shape) for name, x in tensors.items()):
            return {}
        sizes: dict[str, int] = {}
        for name, tensor in tensors.items():
            for dim, size in self._linear_sizes[name].items():
                number = tensor.shape[dim] if dim < tensor.ndim else -1
                value, rest = divmod(number - size.offset, size.factor)
                if rest:
                    raise ShapeError(
                        f"dim {dim} of argument {name!r} is {number}, which minus {size.offset} is "
                        f"no multiple of {size.factor}, as the export says"
                    )
                if sizes.setdefault(size.symbol, value) != value:
                    raise PlanError(
                        f"dim {dim} of argument {name!r} is {number}, but other arguments have "
                        f"{sizes[size.symbol]} for {size.symbol}"
                    )
        return sizes

    def regions(self, leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor, str]]:
        """Name, tensor and part of the global tensor of each argument that is a plain tensor."""
        pairs = zip(self._inputs, leaves, strict=True)
        tensors = ((self._tensors[i.name], x) for i, x in pairs if i.kind is InputKind.USER)
        return [(one.name, x, "all") for one, x in tensors if not isinstance(x, DTensor)]

    def check_passed_again(self, leaves: Sequence[Any]) -> None:
        """Check that no tensor is passed again whose contents forward would have replaced.

        Raises:
            PlanError: one is.
        """
        for number in self._overwritten:
            graph_input, leaf = self._inputs[number], leaves[number]
            if not isinstance(leaf, torch.Tensor):
                continue
            before, version = self._passed.get(graph_input.name, (None, -1))
            if before is not None and before() is leaf and version == version_counter(leaf):
                raise PlanError(
                    f"forward overwrites its argument {graph_input.target!r}, but the planned "
                    f"program leaves the tensor that is passed as it is, and the same one is "
                    f"passed again: make it a buffer of the model, or return its new contents"
                )
            self._passed[graph_input.name] = ref(leaf), version_counter(leaf)

    def rows(self, size: int) -> slice | None:
        """The rows of a batch that this rank reads; all rows if tensors are sharded differently.

        Args:
            size: number of rows of the batch.

        Returns:
            None if no argument of forward has that number of rows.
        """
        taken = [t.rows for t in self._tensors.values() if t.rows and t.shape[0] == size]
        if not taken:
            return None
        return taken[0] if all(rows == taken[0] for rows in taken) else slice(0, size)

    @property
    def row_numbers(self) -> list[int]:
        """The numbers of rows of a batch."""
        return sorted({t.shape[0] for t in self._tensors.values() if t.rows})

    @property
    def row_layout(self) -> Layout:
        """The layout of a tensor of which this rank has the rows that `rows` gives."""
        layouts = [t.layout for t in self._tensors.values() if t.rows]
        types = tuple(t if t.dim == 0 else I for t in layouts[0].types)
        nesting = (axes for axes in layouts[0].nesting if types[axes[0]].is_shard)
        return Layout(types, tuple(nesting))

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments as a flat list in the order of the program's inputs.

        Raises:
            PlanError: they are not those that were exported, or are structured otherwise.
        """
        return self._structure.flatten(args, kwargs)


def check_literal(name: str, exported: object, leaf: Any) -> None:
    """Check that a number, string, boolean or None is passed as when the model was exported.

    Raises:
        PlanError: it is another value.
    """
    if isinstance(leaf, torch.Tensor) or leaf != exported:
        raise PlanError(
            f"argument {name!r} was {exported!r} when the model was exported and is "
            f"{shown(leaf)} now; plan again for the new value"
        )


class _TensorArgument:
    """A tensor argument of forward.

    Args:
        placed: its layout.
        place: position of this rank on the mesh.
        takes_gradient: True if the program computes its gradient.
        fixed_sizes: why it has no other sizes, although it was exported with dynamic ones.

    Attributes:
        shape: global shape.
        layout: the planned layout.
        rows: this rank's slice of dim 0; all rows if it has several slices, None for a scalar.
    """

    def __init__(
        self,
        placed: PlacedInput,
        place: Place,
        mesh: DeviceMesh,
        *,
        takes_gradient: bool,
        fixed_sizes: str = "",
    ) -> None:
        self._placed = placed
        self._fixed_sizes = fixed_sizes
        self._place = place
        self._mesh = mesh
        self._takes_gradient = takes_gradient
        self._dtype: torch.dtype = getattr(torch, placed.dtype)
        self.layout = Layout.parse(placed.layout)
        self.shape = placed.shape
        slices = self.layout.local_slices(self.shape, place.axis_sizes, place.coordinate)
        self.rows: slice | None = None
        if self.shape:
            self.rows = slices[0][0] if len(slices[0]) == 1 else slice(0, self.shape[0])

    @property
    def name(self) -> str:
        """The name of the argument."""
        return self._placed.target

    def fits(self, shape: Sequence[int]) -> bool:
        """True if a shape is the planned global one."""
        return tuple(shape) == self.shape

    def check(self, value: Any, *, any_shape: bool) -> None:
        """Check that a value is a tensor of the planned dtype and, unless any will do, shape."""
        name = self.name
        if not isinstance(value, torch.Tensor):
            raise PlanError(f"argument {name!r} must be a tensor, not {shown(value)}")
        if value.dtype != self._dtype:
            raise PlanError(f"argument {name!r} is {value.dtype}; the plan is for {self._dtype}")
        shape = tuple(value.shape)
        if not any_shape and shape != self.shape:
            fixed = self._fixed_sizes
            raise ShapeError(
                f"argument {name!r} has shape {shape}; "
                f"the plan is for the global shape {self.shape}"
                f"{'. Its dynamic sizes are fixed: ' * bool(fixed)}{fixed}",
                may_be_dynamic=not fixed,
            )

    def localize(self, value: Any) -> torch.Tensor:
        """This rank's shard of a full tensor or of a DTensor."""
        self.check(value, any_shape=False)
        takes_gradient = value.requires_grad and torch.is_grad_enabled()
        if takes_gradient and not self._takes_gradient:
            raise PlanError(
                f"argument {self.name!r} requires a gradient that the plan does not "
                f"compute; export with an example that requires it, or pass a detached tensor"
            )
        place = self._place
        if isinstance(value, DTensor):
            fresh(value)
            given = Placed.of(value)
            if type(value) is DTensor and torch.is_grad_enabled():
                # PyTorch does not count writes into a DTensor as writes into its shard, so that
                # backward would read what was written after forward.
                given = replace(given, local=given.local.clone())
            moved = given.moved_bytes(self.layout)
            if moved:
                say_moved(f"argument {self.name!r}", moved, given, self.layout)
        elif takes_gradient:
            given = Placed.plain(value.to(place.device), self._mesh)
        else:
            shard = local_shard(value, self.layout, place.axis_sizes, place.coordinate)
            return shard.to(place.device)
        return given.resharded(self.layout).local.to(place.device)


class Results:
    """Restores the structure of the results of forward.

    Args:
        stage: has the layout of each output.
        graph: has the structure of the outputs.
        mesh: the devices.
    """

    def __init__(self, stage: Stage, graph: Graph, mesh: DeviceMesh) -> None:
        self._spec: pytree.TreeSpec | None = read_spec(graph.out_spec) if graph.out_spec else None
        self._mesh = mesh
        results = (output for output in stage.outputs if output.updates is None)
        layouts = ((output, Layout.parse(output.layout)) for output in results)
        self._sharded: dict[int, tuple[tuple[Any, ...], tuple[int, ...]]] = {
            output.position: (tuple(to_placements(layout, tuple(mesh.shape))), output.shape)
            for output, layout in layouts
            if not all(t.is_replicated for t in layout.types)
        }

    def nest(self, outputs: Sequence[Any]) -> Any:
        """The result of forward: replicated tensors are plain, sharded ones are DTensors.

        The gradient of a plain one is a DTensor if a DTensor was added to it, such as a penalty of
        parameters, and is made plain.
        """
        values = list(outputs)
        for position, value in enumerate(values):
            if position not in self._sharded and _has_gradient(value):
                value.register_hook(full_tensor)
        for position, (placements, shape) in self._sharded.items():
            values[position] = GlobalTensor.shared(values[position], self._mesh, placements, shape)
        if self._spec is not None:
            return pytree.tree_unflatten(values, self._spec)
        return values[0] if len(values) == 1 else tuple(values)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
