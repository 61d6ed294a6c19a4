"""The program of a stage as a module of torch.fx, which runs in one process on whole tensors."""

from collections.abc import Collection, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from autoshard.errors import PlanError
from autoshard.graph import (
    OPAQUE_MODULE,
    Argument,
    Graph,
    Input,
    InputKind,
    Node,
    OpaqueCall,
    Ref,
    Token,
    references,
)
from autoshard.graph.experts import EXPERT_OPERATORS
from autoshard.graph.export.opaque_modules import tensors_of
from autoshard.layouts import Layout
from autoshard.ops.calls import resolve_operator
from autoshard.runtime.checks.call_structure import read_spec
from autoshard.runtime.program.constants import constant_value, find_held
from autoshard.runtime.program.kernels import bind_kernel
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Place
from autoshard.runtime.program.operators import flat_results, token_object
from autoshard.torch_private import pytree, schema_of

_MODEL_TENSORS = (InputKind.PARAMETER, InputKind.BUFFER)
_WHOLE = Layout.parse("R")


def stage_module(
    program: Graph,
    model: nn.Module,
    *,
    device: torch.device,
    custom_operators: Collection[str] = (),
) -> fx.GraphModule:
    """The program of a stage as a module with the tensors of the model, under their names.

    It is called with what the stage before returns, and the arguments of forward that the stage
    reads by name. It returns one tensor or a tuple for the next stage; the last one returns what
    forward does.

    Args:
        program: the program of a stage, before any rank takes its part of it.
        model: has the parameters, buffers, constants and opaque modules.
        device: of the tensors that the program creates.
        custom_operators: operators outside ATen that the program may call, as `namespace::name` or
            whole namespaces.

    Raises:
        PlanError: the model lacks something that the program reads, or it calls an operator that
            is not allowed.
    """
    writer, names = _Writer(model, device, custom_operators), set(model.state_dict())
    writer.write(program)
    made = fx.GraphModule(writer.attributes, writer.graph, class_name="StageModule")
    _keep_out_of_states(made, names)
    return made.train(model.training)


def _keep_out_of_states(made: nn.Module, names: Collection[str]) -> None:
    """Leave buffers that the state dict of the model does not have out of that of a stage."""
    for name, buffer in list(made.named_buffers(remove_duplicate=False)):
        if name not in names:
            path, _, attribute = name.rpartition(".")
            owner = made.get_submodule(path)
            delattr(owner, attribute)
            owner.register_buffer(attribute, buffer, persistent=False)


class _Nested(nn.Module):
    """The results of forward in the structure in which the model returns them."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self._spec = spec

    def forward(self, *results: Any) -> Any:
        return pytree.tree_unflatten(results, self._spec)


class _Kernel(nn.Module):
    """An operator on rows of experts, which torch does not have."""

    def __init__(self, kernel: LocalKernel) -> None:
        super().__init__()
        self._kernel = kernel

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._kernel(tensors, 0)


class _Writer:
    """Writes a program as a graph of torch.fx.

    Args:
        model: as in `stage_module`.
        device: as in `stage_module`.
        custom: as in `stage_module`.

    Attributes:
        graph: what is written.
        attributes: tensors and modules that the graph reads, by name.
    """

    def __init__(self, model: nn.Module, device: torch.device, custom: Collection[str]) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self._model, self._device, self._custom = model, device, custom
        self._values: dict[str, fx.Node] = {}

    def write(self, program: Graph) -> None:
        """Write inputs, operators, updates of buffers and results."""
        for kind in (InputKind.RECEIVED, InputKind.USER):
            for one in program.inputs:
                if one.kind is kind:
                    self._values[one.name] = self.graph.placeholder(one.name)
        if program.preparation is not None:
            self._write_nodes(program.preparation)
        of_opaque = _read_by_opaque_alone(program)
        for one in program.inputs:
            if one.kind is not InputKind.LITERAL and one.name not in {*self._values, *of_opaque}:
                self._values[one.name] = self._read(program, one)
        self._write_nodes(program)
        self._write_updates(program, of_opaque)
        self._write_results(program)

    def _read(self, program: Graph, read: Input) -> fx.Node:
        """A tensor of the model, in the element type that the program reads."""
        if read.kind in _MODEL_TENSORS:
            found = self._get(read.target)
        else:
            name = f"constant_{read.name}"
            self.attributes[name] = self._constant(program, read)
            found = self.graph.get_attr(name)
        if read.name in program.converted:
            dtype = getattr(torch, program.values[read.name].dtype)
            return self.graph.call_method("to", (found, dtype))
        return found

    def _get(self, name: str) -> fx.Node:
        """A parameter or buffer of the model."""
        path, _, attribute = name.rpartition(".")
        try:
            self.attributes[name] = getattr(self._model.get_submodule(path), attribute)
        except AttributeError:
            raise PlanError(f"the model has no parameter or buffer {name!r}") from None
        return self.graph.get_attr(name)

    def _constant(self, program: Graph, read: Input) -> torch.Tensor:
        known = constant_value(program, read.name, self._device)
        held = None if known is not None else find_held(self._model, read.target)
        value = known if held is None else held.value
        if not isinstance(value, torch.Tensor):
            raise PlanError(
                f"the model has no constant {read.target!r}: export it with export_model, which "
                f"finds or keeps it"
            )
        return value.to(self._device)

    def _write_nodes(self, program: Graph) -> None:
        for node in program.nodes:
            if node.operator == OPAQUE_MODULE:
                made: Sequence[fx.Node] = self._call_opaque(node)
            elif node.operator in EXPERT_OPERATORS:
                made = self._items(self._call_kernel(program, node), len(node.outputs))
            else:
                made = self._call(node)
            self._values.update(zip(node.outputs, made, strict=True))

    def _call(self, node: Node) -> Sequence[fx.Node]:
        operator = resolve_operator(node.operator, custom=self._allowed(node))
        arguments = {name: self._argument(node, value) for name, value in node.arguments}
        args: list[Any] = []
        schema = schema_of(operator)
        for argument in schema.arguments:
            if argument.name not in arguments or argument.kwarg_only:
                break
            args.append(arguments.pop(argument.name))
        made = self.graph.create_node(
            "call_function", operator, tuple(args), arguments, name=node.name
        )
        kinds = [str(returned.type) for returned in schema.returns]
        if kinds == ["Tensor"]:
            return [made]
        if len(kinds) > 1 and set(kinds) != {"Tensor"}:
            made = self.graph.call_function(flat_results, (made,))
        return self._items(made, len(node.outputs))

    def _allowed(self, node: Node) -> Collection[str]:
        namespace, _, rest = node.operator.partition(".")
        packet = rest.partition(".")[0]
        listed = {namespace, f"{namespace}::{packet}"} & set(self._custom)
        return (node.operator,) if listed else ()

    def _argument(self, node: Node, argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return self._values[argument.name]
        if isinstance(argument, Token):
            return token_object(argument, self._device, node)
        if isinstance(argument, tuple):
            return [self._argument(node, item) for item in argument]
        return argument

    def _items(self, made: fx.Node, number: int) -> list[fx.Node]:
        return [self.graph.call_function(getitem, (made, i)) for i in range(number)]

    def _call_kernel(self, program: Graph, node: Node) -> fx.Node:
        shapes, made = (
            tuple(program.values[value].shape for value in values)
            for values in (node.inputs, node.outputs)
        )
        local = LocalNode(
            node=node,
            inputs=(_WHOLE,) * len(node.inputs),
            outputs=(_WHOLE,) * len(node.outputs),
            shapes=shapes,
            input_shapes=shapes,
            output_shapes=made,
            place=Place(axis_sizes=(1,), coordinate=(0,), device=self._device),
        )
        name = f"kernel_{node.name}"
        self.attributes[name] = _Kernel(bind_kernel(local))
        return self.graph.call_module(name, tuple(self._values[value] for value in node.inputs))

    def _call_opaque(self, node: Node) -> list[fx.Node]:
        """Call the module itself, which reads and updates its own tensors."""
        try:
            self.attributes[node.module] = self._model.get_submodule(node.module)
        except AttributeError:
            raise PlanError(
                f"the model has no module {node.module!r}, which is kept whole"
            ) from None
        call = OpaqueCall.from_json(node.argument("call"))
        spec, literals = read_spec(call.arguments), dict(call.literals)
        given = iter(self._argument(node, node.argument("tensors")))
        leaves = [literals[i] if i in literals else next(given) for i in range(spec.num_leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        made = self.graph.call_module(node.module, args, kwargs)
        tensors = self.graph.call_function(tensors_of, (made,))
        results = self._items(tensors, len(call.results))
        return [*results, *(self._get(f"{node.module}.{name}") for name in call.updated)]

    def _write_updates(self, program: Graph, of_opaque: Collection[str]) -> None:
        for output in program.outputs:
            if output.updates is not None and output.updates not in of_opaque:
                assert output.name is not None
                new = self.graph.call_method("detach", (self._values[output.name],))
                old = self._values[output.updates]
                self.graph.call_method("copy_", (old, new))

    def _write_results(self, program: Graph) -> None:
        kept = [output for output in program.outputs if output.updates is None]
        results = [o.literal if o.name is None else self._values[o.name] for o in kept]
        sends = any(output.sent for output in kept)
        if not sends and program.out_spec:
            self.attributes["nested"] = _Nested(read_spec(program.out_spec))
            self.graph.output(self.graph.call_module("nested", tuple(results)))
        else:
            self.graph.output(results[0] if len(results) == 1 else tuple(results))


def _read_by_opaque_alone(program: Graph) -> frozenset[str]:
    """Inputs that only opaque modules read, as their own tensors."""
    own: set[str] = set()
    others = {o.name for o in program.outputs if o.updates is None}
    for node in program.nodes:
        for name, argument in node.arguments:
            names = {ref.name for ref in references(argument)}
            is_state = node.operator == OPAQUE_MODULE and name == "state"
            (own if is_state else others).update(names)
    return frozenset(own - others)
