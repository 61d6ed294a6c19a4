"""Inlining of regions.

A region that switches gradients off is replaced by its body, with a `detach` of every input, so
that nothing inside requires a gradient. A region with autocast switched off is replaced by its
body. With autocast switched on, casts happen at run time and differ between devices, and exports on
the meta device do not record their element types, so such programs are rejected.

Calls of `torch.distributed.pipelining.pipe_split()` are removed; `Node.part` counts those before a
node.
"""

from collections.abc import Callable
from dataclasses import replace

from autoshard.errors import SchemaError, UnsupportedError
from autoshard.graph.archive.parse import PIPE_SPLIT, Body, Program, Region
from autoshard.graph.ir import Argument, Graph, Node, Output, Ref
from autoshard.graph.normalise.rewriting import GraphBuilder, rewire

_SET_GRAD = "higher_order.wrap_with_set_grad_enabled"
_AUTOCAST = "higher_order.wrap_with_autocast"


def inline_regions(program: Program) -> Graph:
    """Inline all regions of a program.

    Raises:
        UnsupportedError: a region cannot be inlined.
        SchemaError: a region and its body differ in their number of inputs or outputs.
    """
    inliner = _Inliner(program.body)
    for step in program.body.steps:
        inliner.add(step, Ref, gradients=True)
    return Graph(
        inputs=program.inputs,
        nodes=tuple(inliner.nodes),
        outputs=tuple(
            o if o.name is None else _as_output(inliner.lookup(o.name))
            for o in program.body.outputs
        ),
        values=inliner.values,
        in_spec=program.in_spec,
        out_spec=program.out_spec,
    )


def _as_output(argument: Argument) -> Output:
    if isinstance(argument, Ref):
        return Output(argument.name)
    if argument is None or isinstance(argument, bool | int | float | str):
        return Output(None, argument)
    raise SchemaError(f"a region returns {argument!r}, which is neither a tensor nor a number")


class _Inliner:
    """Collects the operators of nested bodies, with unique names."""

    def __init__(self, body: Body) -> None:
        self._builder = GraphBuilder((step.name for step in body.steps), body.values)
        self.nodes, self.values = self._builder.nodes, self._builder.values
        self._region_outputs: dict[str, Argument] = {}
        self._part = 0

    def lookup(self, name: str) -> Argument:
        """Resolve a name of the outermost scope."""
        return self._region_outputs[name] if name in self._region_outputs else Ref(name)

    def add(
        self, step: Node | Region, scope: Callable[[str], Argument], *, gradients: bool
    ) -> None:
        """Add a step whose references are resolved by `scope`."""

        def resolve(name: str) -> Argument:
            argument = scope(name)
            return self.lookup(argument.name) if isinstance(argument, Ref) else argument

        if isinstance(step, Node) and step.operator == PIPE_SPLIT:
            self._part += 1
        elif isinstance(step, Node):
            node = rewire(step, resolve)
            self.nodes.append(replace(node, part=self._part) if self._part else node)
        else:
            self._add_region(step, resolve, gradients=gradients)

    def _add_region(
        self, region: Region, scope: Callable[[str], Argument], *, gradients: bool
    ) -> None:
        inside = _gradients_inside(region, gradients=gradients)
        if len(region.operands) != len(region.body.inputs):
            raise SchemaError(
                f"region {region.name!r} passes {len(region.operands)} values to a body of "
                f"{len(region.body.inputs)}"
            )
        names: dict[str, Argument] = {}
        for operand, name in zip(region.operands, region.body.inputs, strict=True):
            if name is not None:
                outer = scope(operand.name) if isinstance(operand, Ref) else operand
                detach = gradients and not inside
                names[name] = self._detach(outer, region) if detach else outer
        self._add_body(region, names, gradients=inside)

    def _add_body(self, region: Region, names: dict[str, Argument], *, gradients: bool) -> None:
        def scope(name: str) -> Argument:
            return names.get(name, Ref(name))

        body = region.body
        for step in body.steps:
            for name in filter(None, step.outputs):
                names[name] = Ref(self._builder.value(name, body.values.get(name)))
            local = self._renamed(step, names)
            self.add(local, scope, gradients=gradients)
        if len(region.outputs) != len(body.outputs):
            raise SchemaError(
                f"region {region.name!r} has {len(region.outputs)} outputs, and its body "
                f"{len(body.outputs)}"
            )
        for name, output in zip(region.outputs, body.outputs, strict=True):
            if not name:  # a number, which has been read where it is used
                continue
            inner = output.literal if output.name is None else scope(output.name)
            self._region_outputs[name] = (
                self.lookup(inner.name) if isinstance(inner, Ref) else inner
            )

    def _renamed(self, step: Node | Region, names: dict[str, Argument]) -> Node | Region:
        """Rename a step and its outputs with unique names."""
        name = self._builder.node_name(step.name)
        renamed = (names[o] if o else "" for o in step.outputs)
        outputs = tuple(new.name if isinstance(new, Ref) else "" for new in renamed)
        if isinstance(step, Node):
            return Node(name, step.operator, step.arguments, outputs, step.module)
        return Region(name, step.operator, step.settings, step.body, step.operands, outputs)

    def _detach(self, value: Argument, region: Region) -> Argument:
        if not isinstance(value, Ref) or value.name not in self.values:
            return value
        tensor = self.values[value.name]
        name = self._builder.value(f"{value.name}_detached", tensor)
        node = self._builder.node_name(f"{region.name}_detach")
        arguments = (("self", value),)
        self.nodes.append(Node(node, "aten.detach.default", arguments, (name,), part=self._part))
        return Ref(name)


def _gradients_inside(region: Region, *, gradients: bool) -> bool:
    """True if gradients are enabled inside a region.

    Raises:
        UnsupportedError: the region cannot be inlined.
    """
    if region.operator == _SET_GRAD and region.settings in ((True,), (False,)):
        inside = region.settings == (True,)
        if inside and not gradients:
            raise UnsupportedError(
                f"region {region.name!r} switches gradients on inside a part that switches them "
                "off; separate the torch.no_grad() blocks before exporting"
            )
        return inside
    if region.operator == _AUTOCAST and len(region.settings) == _NUM_AUTOCAST_SETTINGS:
        if region.settings[_AUTOCAST_ENABLED] is False:
            return gradients
        raise UnsupportedError(
            f"region {region.name!r} runs under torch.autocast, whose casts are not part of the "
            "exported program; leave it out, and export the model with autoshard.export_model(..., "
            "mixed_precision='bfloat16'), or in the element type for training or inference "
            "(for example model.to(torch.bfloat16))"
        )
    raise UnsupportedError(
        f"operator {region.operator} of {region.name!r} runs a sub-graph, which cannot be "
        "planned; export the model without it"
    )


_NUM_AUTOCAST_SETTINGS = 4
"""Device type, element type, enabled, cache enabled."""
_AUTOCAST_ENABLED = 2
