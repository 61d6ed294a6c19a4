"""Operators that write into their input -> operators that return a new value.

Values are grouped by the tensor that they look at (its base). A write makes a new base,
and whoever looks at it later looks at the new one: views are taken again. Where it cannot
be told from the graph whether two values share memory (a `reshape` may copy), using one
after the other was written to is refused.

What the caller could see of a write is lost on purpose in two cases: a user input that the
model overwrites keeps its value in the caller's hands, and an integer counter among the
buffers (`num_batches_tracked`) is not advanced.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autoshard.errors import UnsupportedError
from autoshard.graph.ir import (
    Argument,
    Graph,
    Input,
    InputKind,
    Node,
    Ref,
    Tensor,
    Token,
    TokenKind,
)
from autoshard.graph.normalise.inplace import OVERWRITES, is_inplace, plain_form, promotes
from autoshard.graph.normalise.memory import (
    Emit,
    View,
    is_same,
    may_share,
    views_of,
    write_back,
)
from autoshard.graph.normalise.names import Names, rewire
from autoshard.graph.normalise.promotion import keeps_dtype
from autoshard.graph.normalise.read import required


def make_functional(graph: Graph) -> Graph:
    """The graph without operators that write into their inputs.

    Expects explicit dims and bounds.

    Raises:
        UnsupportedError: a write cannot be carried through, or reaches a parameter or a
            buffer, which a plan cannot update; the message names the node.
    """
    if not any(is_inplace(node.operator) for node in graph.nodes):
        return graph
    state = _Memory(graph)
    for node in graph.nodes:
        if is_inplace(node.operator):
            state.write(node)
        else:
            state.read(node)
    outputs = tuple(
        o if o.name is None else replace(o, name=state.now(o.name, _RETURN)) for o in graph.outputs
    )
    return replace(graph, nodes=tuple(state.nodes), outputs=outputs, values=state.values)


_RETURN = Node("return", "return", (), ())
"""Who uses the outputs of the graph."""


class _Memory:
    """What every value of the old graph is called in the new one at this point."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = []
        self.values: dict[str, Tensor] = dict(graph.values)
        self._inputs: Mapping[str, Input] = {i.name: i for i in graph.inputs}
        self._value_names = Names(graph.values)
        self._node_names = Names(node.name for node in graph.nodes)
        self._base = {name: name for name in graph.values}
        self._views: dict[str, tuple[View, ...]] = dict.fromkeys(graph.values, ())
        self._current = {name: name for name in graph.values}
        self._version: dict[str, int] = defaultdict(int)
        self._seen: dict[str, int] = defaultdict(int)
        self._may_share: dict[str, set[str]] = defaultdict(set)
        self._stale: dict[str, str] = {}
        self._contents: dict[str, str] = {}

    def read(self, node: Node) -> None:
        """Add an operator that only reads."""
        self.nodes.append(rewire(node, lambda name: Ref(self.now(name, node))))
        if is_same(node, self.values):
            self._look(node.outputs[0], node.inputs[0], ())
        elif may_share(node):
            for output in node.outputs:
                for name in node.inputs:
                    self._may_share[self._base[name]].add(output)
                    self._may_share[output].add(self._base[name])
        else:
            views = views_of(node, self.values)
            for output, view in zip(node.outputs, views, strict=False):
                self._look(output, node.inputs[0], (view,))

    def _look(self, name: str, at: str, views: tuple[View, ...]) -> None:
        self._base[name] = self._base[at]
        self._views[name] = self._views[at] + views
        self._seen[name] = self._version[self._base[name]]

    def now(self, name: str, user: Node) -> str:
        """The value that holds what `name` holds at this point."""
        base = self._base[name]
        if base in self._stale:
            raise UnsupportedError(
                f"{user.name!r} uses {name!r}, which may share memory with what "
                f"{self._stale[base]!r} has overwritten; clone it first, or write "
                "the operator without the trailing underscore"
            )
        if self._seen[name] != self._version[base]:
            value = self._contents.get(base, base)
            emit = self._emitter(user)
            for view in self._views[name]:
                source = Ref(value)
                value = emit(view.operator, view.tensor, self=source, **dict(view.arguments))
            self._current[name] = value
            self._seen[name] = self._version[base]
        return self._current[name]

    def write(self, node: Node) -> None:
        """Add an operator that writes into its first input."""
        name = required(node, "self", Ref).name
        base = self._base[name]
        self._refuse_state(node, base)
        new = self._new_contents(node, self.now(name, node))
        self._spread(node, base)
        old = self._contents.get(base, base)
        self._contents[base] = self._carry_back(node, old, self._views[name], new)
        self._version[base] += 1
        for alias in (name, node.outputs[0]):
            self._base[alias] = base
            self._views[alias] = self._views[name]
            self._current[alias] = new
            self._seen[alias] = self._version[base]

    def _refuse_state(self, node: Node, base: str) -> None:
        source = self._inputs.get(base)
        if source is None or source.kind is InputKind.USER:
            return
        if node.operator == "aten.detach_.default":  # it changes no contents
            return
        tensor = self.values[base]
        is_counter = not tensor.shape and not tensor.dtype.is_differentiable
        if source.kind is not InputKind.BUFFER or not is_counter:
            raise UnsupportedError(
                f"node {node.name!r} ({node.operator}) overwrites the {source.kind.value} "
                f"{source.target!r}, and a plan cannot update the model's state; "
                "return the new value from forward and store it outside"
            )

    def _spread(self, node: Node, base: str) -> None:
        """Mark everything that may share memory with what is written."""
        reached, waiting = {base}, [base]
        while waiting:
            for other in self._may_share[waiting.pop()] - reached:
                reached.add(other)
                waiting.append(other)
        self._stale.update(dict.fromkeys(reached - {base}, node.name))

    def _new_contents(self, node: Node, old: str) -> str:
        if node.operator in OVERWRITES:
            return self._overwrite(node, old)
        tensor = self.values[old]
        for name in node.inputs[1:]:
            other = self.values[name]
            if promotes(node.operator) and not keeps_dtype(tensor, other):
                raise UnsupportedError(
                    f"node {node.name!r} ({node.operator}) writes {other.dtype.value} into "
                    f"{tensor.dtype.value}; convert {name!r} with .to() first"
                )
        read = rewire(node, lambda name: Ref(self.now(name, node)))
        self.values[node.outputs[0]] = tensor
        self.nodes.append(replace(read, operator=plain_form(node)))
        return node.outputs[0]

    def _overwrite(self, node: Node, old: str) -> str:
        """New contents that depend on the old ones by their shape and type only."""
        emit = self._emitter(node)
        tensor = self.values[old]
        source = OVERWRITES[node.operator]
        if source is None:
            return emit("aten.zeros_like.default", tensor, self=Ref(old))
        value = node.argument(source)
        if not isinstance(value, Ref):
            return emit("aten.full_like.default", tensor, self=Ref(old), fill_value=value)
        new = self.now(value.name, node)
        if self.values[new].shape != tensor.shape:
            wide = Tensor(tensor.shape, self.values[new].dtype)
            new = emit("aten.expand.default", wide, self=Ref(new), size=tensor.shape)
        if self.values[new].dtype is not tensor.dtype:
            dtype = Token(TokenKind.DTYPE, tensor.dtype.value)
            new = emit("aten.to.dtype", tensor, self=Ref(new), dtype=dtype)
        return new

    def _carry_back(self, node: Node, base: str, views: tuple[View, ...], new: str) -> str:
        """The base's contents after a view of it got new contents."""
        emit = self._emitter(node)
        behind = [base]
        for view in views[:-1]:
            arguments = {"self": Ref(behind[-1]), **dict(view.arguments)}
            behind.append(emit(view.operator, view.tensor, **arguments))
        for view, old in zip(reversed(views), reversed(behind), strict=False):
            written = write_back(view, self.values[old], old=old, new=new, emit=emit)
            if written is None:
                raise UnsupportedError(
                    f"node {node.name!r} ({node.operator}) writes into every other element of a "
                    "tensor; write the operator without the trailing underscore"
                )
            new = written
        return new

    def _emitter(self, origin: Node) -> Emit:
        def emit(operator: str, out: Tensor, /, **arguments: Argument) -> str:
            stem = f"{origin.name}_{operator.split('.')[1]}"
            name = self._value_names.fresh(stem)
            node = self._node_names.fresh(stem)
            self.values[name] = out
            self.nodes.append(
                Node(node, operator, tuple(arguments.items()), (name,), origin.module)
            )
            return name

        return emit
