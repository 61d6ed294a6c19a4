"""Conversion between the arguments and results of forward and the flat tensors of a program."""

from collections.abc import Mapping, Sequence
from inspect import Signature
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.graph import Graph, InputKind
from autoshard.layouts import Layout, R, to_placements
from autoshard.plan import PlacedInput, Stage
from autoshard.runtime.call_structure import CallStructure, read_spec
from autoshard.runtime.dtensors import from_local, full_tensor, local_tensor
from autoshard.runtime.local_node import Place
from autoshard.runtime.sharded_results import ShardedResult
from autoshard.runtime.shards import local_shard, shape_of
from autoshard.torch_private import pytree, version_counter


class ShapeError(PlanError):
    """Tensors of a call have other shapes than the plan.

    Args:
        reason: says which.

    Attributes:
        reason: as given; the message adds the ways out.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason}: leave the last smaller batch out (drop_last=True), pad it, export with "
            f"dynamic_shapes, or make a plan for these shapes too"
        )


class Arguments:
    """Checks and shards the arguments of forward.

    Args:
        stage: has the layout of each tensor.
        graph: has the structure of the arguments, and the literals among them.
        place: position of this rank on the mesh.
        signature: signature of the model's forward, without `self`; None if unknown.
    """

    def __init__(
        self, stage: Stage, graph: Graph, place: Place, signature: Signature | None = None
    ) -> None:
        kinds = (InputKind.USER, InputKind.LITERAL)
        self._inputs = tuple(i for i in graph.inputs if i.kind in kinds)
        targets = [i.target for i in self._inputs]
        self._structure = CallStructure(targets, graph.in_spec, signature)
        placed = {i.name: i for i in stage.inputs if i.kind == "user"}
        self._slots = {i.name: slot for slot, i in enumerate(stage.inputs)}
        self._overwritten = [n for n, i in enumerate(self._inputs) if i.overwritten]
        self._tensors = {
            name: _TensorArgument(tensor, place, takes_gradient=graph.values[name].requires_grad)
            for name, tensor in placed.items()
        }
        self._passed: dict[str, tuple[ReferenceType[torch.Tensor], int]] = {}
        self._symbols = {n: graph.dynamic.symbols_of(n) for n in placed} if graph.dynamic else {}

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
                self._tensors[name].check(leaf, any_shape=bool(self._symbols.get(name)))
            else:
                check_literal(graph_input.target, graph_input.literal, leaf)

    def sizes(self, leaves: Sequence[Any]) -> dict[str, int]:
        """The dynamic sizes by symbol; empty if they are the planned ones.

        Args:
            leaves: the arguments, from `flatten`. Tensors of other sizes than planned must be
                full ones or DTensors.

        Raises:
            PlanError: two tensors have different sizes for one symbol.
        """
        if not self._symbols:
            return {}
        given = {i.name: x for i, x in zip(self._inputs, leaves, strict=True)}
        tensors = {name: given[name] for name in self._tensors}
        tensors = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        if all(self._tensors[name].fits(x.shape) for name, x in tensors.items()):
            return {}
        sizes: dict[str, int] = {}
        for name, tensor in tensors.items():
            for dim, symbol in self._symbols[name].items():
                number = tensor.shape[dim] if dim < tensor.ndim else -1
                if sizes.setdefault(symbol, number) != number:
                    raise PlanError(
                        f"dim {dim} of argument {name!r} is {number}, but other arguments have "
                        f"{sizes[symbol]} for {symbol}"
                    )
        return sizes

    def regions(self, leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor, str]]:
        """Name, tensor and part of the global tensor of each argument that is a plain tensor."""
        pairs = zip(self._inputs, leaves, strict=True)
        tensors = ((self._tensors[i.name], x) for i, x in pairs if i.kind is InputKind.USER)
        return [
            (tensor.name, x, tensor.part(x.shape))
            for tensor, x in tensors
            if not isinstance(x, DTensor)
        ]

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
    def row_numbers(self) -> tuple[list[int], list[int]]:
        """The numbers of rows of a batch, and of this rank's part of one."""
        rows = [(t.shape[0], t.rows.stop - t.rows.start) for t in self._tensors.values() if t.rows]
        return sorted({whole for whole, _ in rows}), sorted({own for _, own in rows})

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
            f"{_shown(leaf)} now; plan again for the new value"
        )


class _TensorArgument:
    """A tensor argument of forward.

    Attributes:
        shape: global shape.
        rows: this rank's slice of dim 0; all rows if it has several slices, None for a scalar.
    """

    def __init__(self, placed: PlacedInput, place: Place, *, takes_gradient: bool) -> None:
        self._placed = placed
        self._place = place
        self._takes_gradient = takes_gradient
        self._dtype: torch.dtype = getattr(torch, placed.dtype)
        layout = Layout.parse(placed.layout)
        self._placements = to_placements(layout, place.axis_sizes)
        self.shape = placed.shape
        slices = layout.local_slices(self.shape, place.axis_sizes, place.coordinate)
        self._slices = slices
        self._local_shape = shape_of(slices)
        self.rows: slice | None = None
        # The layout that shards a tensor of each accepted shape; None if it is a shard already.
        self._layouts: dict[tuple[int, ...], Layout | None] = {}
        if self.shape:
            self.rows = slices[0][0] if len(slices[0]) == 1 else slice(0, self.shape[0])
            num_rows = self.rows.stop - self.rows.start
            self._layouts[num_rows, *self.shape[1:]] = _without_rows(layout)
        self._layouts[self.shape] = layout
        self._layouts[self._local_shape] = None

    @property
    def name(self) -> str:
        """The name of the argument."""
        return self._placed.target

    def part(self, shape: Sequence[int]) -> str:
        """Part of the global tensor that a tensor of an accepted shape is."""
        if tuple(shape) == self.shape:
            return "all"
        return str(self._slices if tuple(shape) == self._local_shape else self._slices[0])

    def fits(self, shape: Sequence[int]) -> bool:
        """True if a shape is the global one, that of this rank's rows, or that of its shard."""
        return tuple(shape) in self._layouts

    def check(self, value: Any, *, any_shape: bool) -> None:
        """Check that a value is a tensor of the planned dtype and, unless any will do, shape."""
        name = self._placed.target
        if not isinstance(value, torch.Tensor):
            raise PlanError(f"argument {name!r} must be a tensor, not {_shown(value)}")
        if value.dtype != self._dtype:
            raise PlanError(f"argument {name!r} is {value.dtype}; the plan is for {self._dtype}")
        shape = tuple(value.shape)
        if not any_shape and shape not in self._layouts:
            raise ShapeError(
                f"argument {name!r} has shape {shape}; the plan is for the global shape "
                f"{self.shape}, or {self._local_shape} where a rank passes its own shard"
            )

    def localize(self, value: Any) -> torch.Tensor:
        """This rank's shard of a full tensor, a DTensor, or a tensor that is the shard."""
        self.check(value, any_shape=False)
        name = self._placed.target
        if value.requires_grad and not self._takes_gradient and torch.is_grad_enabled():
            raise PlanError(
                f"argument {name!r} requires a gradient that the plan does not compute; export "
                f"with an example that requires it, or pass a detached tensor"
            )
        return self._local(value).to(self._place.device)

    def _local(self, value: torch.Tensor) -> torch.Tensor:
        name, shape = self._placed.target, tuple(value.shape)
        if isinstance(value, DTensor):
            if value.placements != self._placements or shape != self.shape:
                raise PlanError(
                    f"argument {name!r} is a DTensor of shape {shape} placed {value.placements}; "
                    f"the plan needs {self.shape} placed {self._placements}: redistribute it, or "
                    f"pass the full tensor"
                )
            return local_tensor(value)
        layout, place = self._layouts[shape], self._place
        if layout is None:
            return value
        takes_gradient = value.requires_grad and torch.is_grad_enabled()
        if takes_gradient and any(t.is_shard for t in layout.types):
            raise PlanError(
                f"argument {name!r} requires a gradient, and the plan shards it as {layout}, so "
                f"each rank would get the gradient of its own shard only: pass "
                f"distribute_tensor({name}, mesh, {list(self._placements)}), or plan with "
                f'{name!r} replicated (pins {{"inputs": {{{name!r}: "I"}}}})'
            )
        return local_shard(value, layout, place.axis_sizes, place.coordinate)


def _without_rows(layout: Layout) -> Layout:
    """A layout in which dim 0 is not sharded."""
    nesting = (axes for axes in layout.nesting if layout.types[axes[0]].dim)
    return Layout(tuple(t if t.dim else R for t in layout.types), tuple(nesting))


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
        names = [output.name for output in graph.outputs[: graph.num_results]]
        made = [graph.values[name] for name in names if name is not None]
        self._has_loss = any(tensor.requires_grad and not tensor.shape for tensor in made)
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
        if not torch.compiler.is_compiling():
            for position, value in enumerate(values):
                if position not in self._sharded and _has_gradient(value):
                    value.register_hook(full_tensor)
        for position, (placements, shape) in self._sharded.items():
            local = values[position]
            # A compiled backward does not support a DTensor without a gradient.
            if self._has_loss and torch.compiler.is_compiling():
                local = local.detach()
            result = from_local(local, self._mesh, placements, shape)
            guarded = local.requires_grad and not torch.compiler.is_compiling()
            values[position] = ShardedResult.of(result) if guarded else result
        if self._spec is not None:
            return pytree.tree_unflatten(values, self._spec)
        return values[0] if len(values) == 1 else tuple(values)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.80}"
