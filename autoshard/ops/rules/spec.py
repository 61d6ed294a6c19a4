"""The description of an operator, `OperatorSpec`, and of one call of it, `Call`."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import cache
from math import prod

from autoshard.errors import SchemaError
from autoshard.graph import Argument, CallRule, DType, Graph, Node, Tensor, anonymous, references
from autoshard.ops.rules.rule import OperatorRule
from autoshard.ops.rules.strides import FullStrides, Shape


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator: its arguments and the shapes of its tensors.

    Attributes:
        operator: namespace, packet and overload, as in `aten.add.Tensor`.
        arguments: schema name and value of each explicit argument, in schema order.
        inputs: the tensor inputs, in the order of `Node.inputs`.
        outputs: the outputs.
        custom_rule: rule in the graph, used if there is no built-in rule.
    """

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    custom_rule: CallRule | None = None

    def argument(self, name: str, default: Argument = None) -> Argument:
        """Return the argument with a schema name, or `default` if it is absent."""
        return next((value for key, value in self.arguments if key == name), default)

    def positions(self, name: str) -> tuple[int, ...]:
        """Positions in `inputs` of the tensors in an argument; () if it has none."""
        first = 0
        for key, value in self.arguments:
            count = sum(1 for _ in references(value))
            if key == name:
                return tuple(range(first, first + count))
            first += count
        return ()

    def tensor(self, name: str) -> Tensor | None:
        """Return the tensor in an argument; None if the argument is not a tensor."""
        positions = self.positions(name)
        return self.inputs[positions[0]] if positions else None

    @property
    def names(self) -> tuple[str, ...]:
        """Schema name of the argument that each input belongs to."""
        return tuple(key for key, value in self.arguments for _ in references(value))

    def integer(self, name: str, default: int) -> int:
        """Return an integer argument.

        Raises:
            SchemaError: the argument is not an integer.
        """
        value = self.argument(name, default)
        if not isinstance(value, int):
            raise SchemaError(f"{self.operator}: {name} is {value!r}, not an integer")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; an integer is a list of one, None or absent is ()."""
        value = self.argument(name)
        items = value if isinstance(value, tuple) else () if value is None else (value,)
        return tuple(item for item in items if isinstance(item, int))

    def number(self, name: str, default: float) -> float:
        """Return a number argument.

        Raises:
            SchemaError: the argument is not a number.
        """
        value = self.argument(name, default)
        if not isinstance(value, (int, float)):
            raise SchemaError(f"{self.operator}: {name} is {value!r}, not a number")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean argument."""
        return bool(self.argument(name, default))

    def dims(self, name: str) -> frozenset[int]:
        """Return dims of the first input (an integer or a list), non-negative."""
        rank = max(len(self.inputs[0].shape), 1)
        return frozenset(dim % rank for dim in self.integers(name))

    def dim(self, name: str, default: int) -> int:
        """Return a dim of the first input, non-negative; 0 for a scalar."""
        return self.integer(name, default) % max(len(self.inputs[0].shape), 1)


def call_of(graph: Graph, node: Node) -> Call:
    """Return the call of a node, which is equal for equal calls of other tensors."""
    return Call(
        operator=node.operator,
        arguments=tuple((name, anonymous(value)) for name, value in node.arguments),
        inputs=tuple(graph.values[name] for name in node.inputs),
        outputs=tuple(graph.values[name] for name in node.outputs),
        custom_rule=graph.rule_of(node),
    )


Rule = Callable[[Call], OperatorRule]
"""The sharding rule of an operator: a function of the call."""

Gradients = Sequence[bool]
"""For each input of a call, True if it needs a gradient."""

StrideFunction = Callable[[Call, Shape, FullStrides, Shape], FullStrides | None]
"""Strides of an operator's outputs over the memory of its first input, from the call, the shape
and strides of that input and the shape of the first output; None if the operator copies."""


@dataclass(frozen=True, slots=True)
class ExtraTensor:
    """A tensor that only autograd uses, with dims of the call's tensors.

    Attributes:
        dims: (tensor, dim) pairs whose sizes multiply; tensors count the call's inputs, then
            its outputs.
        itemsize: bytes of an element.
        times: a further factor.
    """

    dims: tuple[tuple[int, int], ...]
    itemsize: int
    times: int = 1

    def nbytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Bytes, given the (local) shapes of the call's inputs, then of its outputs."""
        return self.times * self.itemsize * prod(shapes[tensor][dim] for tensor, dim in self.dims)


@dataclass(frozen=True, slots=True)
class SavedByAutograd:
    """The tensors that autograd saves in the forward of a call, until its backward has run.

    Attributes:
        inputs: positions in `Call.inputs` of the saved inputs.
        outputs: positions of the saved outputs.
        extras: other tensors that are saved.
    """

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    extras: tuple[ExtraTensor, ...] = ()


NOTHING_SAVED = SavedByAutograd()


def saves_everything(call: Call, _: Gradients) -> SavedByAutograd:
    """All inputs and outputs: an upper estimate for every operator that is not a composite."""
    return SavedByAutograd(frozenset(range(len(call.inputs))), frozenset(range(len(call.outputs))))


def saved_by_name(
    names: str, call: Call, gradients: Gradients, *extras: ExtraTensor
) -> SavedByAutograd:
    """Saved tensors by schema name, in the notation of `OperatorSpec.saves`."""
    inputs: set[int] = set()
    outputs: set[int] = set()
    for name, conditions in _terms(names):
        if conditions and not any(gradients[i] for c in conditions for i in call.positions(c)):
            continue
        if name.startswith("out"):
            outputs.add(int(name[3:] or 0))
        else:
            inputs.update(call.positions(name))
    return SavedByAutograd(frozenset(inputs), frozenset(outputs), extras)


@cache
def _terms(names: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    terms = (term.partition(":") for term in names.split())
    return tuple(
        (name, tuple(condition.split(",")) if colon else ()) for name, colon, condition in terms
    )


def statistic(call: Call, dims: Sequence[int], *, times: int = 1) -> ExtraTensor:
    """A mean, a deviation or a log-sum-exp over the other dims of the first input."""
    itemsize = max(call.inputs[0].dtype.itemsize, DType.FLOAT32.itemsize)
    return ExtraTensor(tuple((0, dim) for dim in dims), itemsize, times)


def like(call: Call, tensor: int, itemsize: int, *, times: int = 1) -> ExtraTensor:
    """A tensor of the shape of one of the call's, counted over inputs, then outputs."""
    rank = len((*call.inputs, *call.outputs)[tensor].shape)
    return ExtraTensor(tuple((tensor, dim) for dim in range(rank)), itemsize, times)


class Kernel(StrEnum):
    """Change of a call when it runs on the local tensors of a rank.

    `x` is the operator's first tensor input, local; "the local output shape" is the local shape
    of output 0 in the layout of the strategy; "the argument" is `OperatorSpec.kernel_argument`.
    """

    PLAIN = "plain"
    """No difference."""
    RESIZE = "resize"
    """The argument becomes the local output shape."""
    RESHAPE = "reshape"
    """`x.reshape(local output shape)`: sizes and dims in the arguments of a reshape, a flatten
    or a squeeze describe the global tensor."""
    REPEAT = "repeat"
    """The argument becomes the number of times that each dim of `x` fits into the local output
    shape."""
    SPLIT = "split"
    """Pieces of a dim have their local lengths."""
    RANGE = "range"
    """A range of a dim starts at the local start of its piece, and has its local length."""
    GROUPS = "groups"
    """The argument, a number of groups of the channels in dim 1 of the global `x`, becomes the
    rank's share of it, and at least 1."""
    VOCABULARY = "vocabulary"
    """An embedding with local rows [first, first + n) of the table, where `first` is the global
    index of the local shard's first row. Other ids are looked up at row 0 and give zero rows with
    zero gradients; `first` is subtracted from ids and from `padding_idx`, which is dropped if it
    lies outside. Plain if the table's rows are not sharded."""
    BAGS = "bags"
    """Outputs other than the first are integer tables that only backward reads, and whose shapes
    differ between devices. One of another shape than planned becomes zeros of that shape."""
    COUNTS = "counts"
    """Integers are counted as float64 on devices whose kernel takes floating-point input only."""
    EXPERTS = "experts"
    """A grouped product with a shard of the rows, of the matrices, or both. The argument, the end
    of each group, becomes that of the local matrices, in local rows. Rows of other matrices are
    moved behind the last group, where they cost nothing; they and their gradients are zero."""
    ROUTED = "routed"
    """An operator of `autoshard.graph.experts`. Local rows are one tensor [1, n, d], ordered by
    expert and then by token; n follows from the ids."""
    MODULE = "module"
    """A call of a module of the model (`autoshard.graph.opaque_call`)."""
    DIAGONAL = "diagonal"
    """The argument, a diagonal of the last two dims, becomes that of the local rows and
    columns."""
    ATTENTION = "attention"
    """Like `SHARDED_DIM` if keys are sharded. If the flag named by the argument is set, local
    queries see the keys up to their own global position, and later keys are left out."""
    SCALED = "scaled"
    """A mean: the result is multiplied by the rank's share of the averaged elements, which is 1/n
    for n equal shards. An axis shards a letter of the mean if an input is a shard and output 0
    is partial on it. If the argument names a reduction, only if that is 1 (mean, the default)."""
    SHARDED_DIM = "sharded_dim"
    """If the dims that the operator works along are sharded, ranks combine statistics as
    `OperatorRule.reduced` says, or exchange edges as `OperatorRule.halo` does. Otherwise plain,
    or `GROUPS` if an argument is named."""
    CLASSES = "classes"
    """`SHARDED_DIM` for the classes of a loss, and `SCALED` for its positions."""


@dataclass(frozen=True)
class OperatorSpec:
    """Properties of an operator, or of several operators that have all properties in common.

    An operator is added by an entry in the `SPECS` of its family's file, with an example; the
    tests run every example on simulated ranks, and compare values, gradients and saved tensors
    with PyTorch's. What an operator computes on a rank follows from `rule`: its floating-point
    operations, its bytes, and its cost category (`autoshard.costs.categorise`).

    `saves` lists tensors by schema name, and `out` (or `out1`, ...) for outputs. `weight:input`
    is saved if `input` needs a gradient, `input` alone if anything does; "" saves nothing. The
    source is PyTorch's `tools/autograd/derivatives.yaml`, and for composite operators their
    parts. Where devices differ it is that of CUDA: fused attention saves a log-sum-exp per row
    instead of all scores, RMS norms are fused, a dropout mask has a byte per element. A product
    that saves a rearranged copy of an input counts as saving the input. Single elements are not
    counted, nor are the ids that `Kernel.VOCABULARY` shifts.

    Attributes:
        operators: names separated by spaces: `max.dim`, or `add` for all overloads; other
            namespaces in full, as in `autoshard.dispatch.default`.
        rule: the sharding rule.
        saves: the tensors that autograd saves.
        backward_workspace: temporary tensors of backward, without the gradients that it returns.
        compiled_saves: the tensors that are saved if a compiler generates the kernels of both
            passes, whose backward then needs no temporary tensors; None if that is not known, or
            no different.
        is_view: True if the outputs always share the input's memory (a reshape may copy).
        strides: strides of outputs that share the first input's memory; None if they never do.
        passes_gradient: True if the gradient of an input is the output's gradient itself, or a
            view of it.
        keeps_memory_order: True if an output has the memory order (of dims) of the first input with
            its shape, as with `TensorIterator`; otherwise outputs are contiguous.
        kernel: how the call changes on a rank.
        kernel_argument: schema name of the argument that the kernel is about.
        draws: random numbers: None if the operator draws none, "" if it does, or the schema name of
            a probability if it does unless that is 0. Ranks that differ only on axes
            that do not shard output 0 (they have replicas, or terms of one sum) draw the same
            numbers, and ranks with different shards different ones.
        unsharded: reason why some dims cannot be sharded, for users.
        examples: calls that document and test the spec, one per line; see `autoshard.ops.examples`.
    """

    operators: str
    rule: Rule
    _: KW_ONLY
    saves: str | Callable[[Call, Gradients], SavedByAutograd]
    backward_workspace: Callable[[Call, Gradients], tuple[ExtraTensor, ...]] | None = None
    compiled_saves: Callable[[Call, Gradients], SavedByAutograd] | None = None
    is_view: bool = False
    strides: StrideFunction | None = None
    passes_gradient: Callable[[Call, int], bool] | None = None
    keeps_memory_order: bool = False
    kernel: Kernel = Kernel.PLAIN
    kernel_argument: str = ""
    draws: str | None = None
    unsharded: str = ""
    examples: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Full names, as in `aten.max.dim` or `aten.add`."""
        names = self.operators.split()
        return tuple(name if name.count(".") > 1 else f"aten.{name}" for name in names)


def same_dtype(call: Call, position: int) -> bool:
    """True if the output's gradient is passed without a cast."""
    return call.inputs[position].dtype is call.outputs[0].dtype


def addends(**factors: str) -> Callable[[Call, int], bool]:
    """Return a predicate: the output's gradient is that of inputs added without broadcasting.

    Args:
        factors: schema name of each such input, and of the argument that scales it, or "".
    """

    def passes(call: Call, position: int) -> bool:
        source, factor = call.inputs[position], factors.get(call.names[position])
        return (
            factor is not None
            and same_dtype(call, position)
            and source.shape == call.outputs[0].shape
            and call.number(factor, 1) == 1
        )

    return passes
