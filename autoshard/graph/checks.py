"""Validation of graphs: unique names, topological order, shapes, and limits on rules."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isclose, prod
from typing import Any

from autoshard.base.integers import format_integer
from autoshard.errors import SchemaError
from autoshard.graph.dims import check_dims
from autoshard.graph.dtype import DType
from autoshard.graph.ir import CallRule, Graph, InputKind, Node, references
from autoshard.graph.sizes.dynamic_sizes import MAX_CONDITIONS, Dynamic, value_of
from autoshard.graph.sizes.dynamic_sizes import Path as DocumentPath
from autoshard.graph.sizes.expressions import MAX_FACTORS, SIZE_LIMIT, Number, evaluate

RULES_VERSION = 2
"""Version of the rules that `autoshard.discovery` finds; part of their cache keys."""

MAX_RULES = 1024
"""Maximum number of rules of one graph."""

MAX_LETTERS = 64
"""Maximum number of letters of a rule; PyTorch tensors have at most 64 dims."""

MAX_FREE = 16
"""Maximum number of shardable letters of a rule: strategies are combinations of them."""

MAX_GROUPS = 8
"""Maximum number of linear groups of a rule: they multiply strategies too."""

MAX_TENSORS = 256
"""Maximum number of inputs, and of outputs, of a rule."""

MAX_TENSOR_BYTES = 1 << 56
"""Maximum size of a tensor, counting empty dims as one element."""

MAX_PROGRAM_BYTES = 1 << 59
"""Maximum size of all tensors of a program together, one copy for each use."""

FILL_PACKETS = frozenset({"full", "ones", "scalar_tensor", "zeros"})
CREATION_PACKETS = FILL_PACKETS | {
    "arange",
    "eye",
    "linspace",
    "logspace",
    "tril_indices",
    "triu_indices",
}
"""Packets that create a tensor from their arguments alone."""

DETERMINISTIC_PACKETS = frozenset(
    """
    __and__ __or__ __xor__ abs add all amax amin any argmax argmin bitwise_and bitwise_not
    bitwise_or bitwise_xor broadcast_tensors broadcast_to bucketize cat ceil chunk clamp clamp_max
    clamp_min constant_pad_nd cos cumprod cumsum detach diagonal diff div einsum eq exp expand
    fill flip floor floor_divide fmod full_like gather ge gt index index_put index_select isin
    isinf isnan le log log10 log1p log2 logical_and logical_not logical_or logical_xor lt
    masked_fill max maximum mean meshgrid min minimum movedim mul narrow ne neg new_full new_ones
    new_zeros one_hot ones_like pad permute pow reciprocal remainder repeat repeat_interleave
    reshape roll round rsqrt rsub scatter select select_scatter sign sin slice slice_scatter split
    split_with_sizes sqrt squeeze stack sub sum t tanh to transpose tril triu trunc unbind unfold
    unsqueeze where zeros_like
    """.split()  # noqa: SIM905  a table of words
)
"""Deterministic packets that may move from the step to the preparation."""


def may_prepare(node: Node) -> bool:
    """True if a call may be prepared: with constant inputs it has constant outputs."""
    namespace, packet = node.operator.split(".")[:2]
    return namespace == "aten" and packet in (
        DETERMINISTIC_PACKETS if node.inputs else CREATION_PACKETS
    )


def check_shape(shape: Sequence[int], dtype: DType) -> None:
    """Check that a tensor has no negative size, and is not larger than any memory.

    Raises:
        SchemaError: it has, or it is.
    """
    nbytes = dtype.itemsize
    for size in shape:
        if size < 0:
            raise SchemaError(f"the shape {_shape_text(shape)} has a negative size")
        nbytes *= size or 1
    if nbytes > MAX_TENSOR_BYTES:
        raise SchemaError(
            f"a tensor of shape {_shape_text(shape)} and type {dtype} has "
            f"{format_integer(nbytes)} bytes; at most {MAX_TENSOR_BYTES:,} can be planned"
        )


def check_total_bytes(graph: Graph, copies: int = 1) -> None:
    """Check that the bytes of all tensors of a program can be summed exactly.

    Args:
        graph: the program.
        copies: number of times that it is in memory: its micro-batches in flight.

    Raises:
        SchemaError: they cannot.
    """
    nbytes = copies * graph.nbytes_of_uses
    if nbytes > MAX_PROGRAM_BYTES:
        raise SchemaError(
            f"the tensors of the program have {format_integer(nbytes)} bytes together; at most "
            f"{MAX_PROGRAM_BYTES:,} can be planned"
        )


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(format_integer, shape))}]"


def check_wiring(graph: Graph) -> None:
    """Check names, topological order, shapes and dims of a graph.

    Raises:
        SchemaError: a name is used twice, or a value is used before it is produced (for example in
            a cycle) or has no shape, or an operator has a dim that its tensors have not; the
            message has the name.
    """
    _check_unique("node", Counter(node.name for node in graph.nodes))
    made = [i.name for i in graph.inputs if i.kind is not InputKind.LITERAL]
    _check_unique("value", Counter([*made, *(o for node in graph.nodes for o in node.outputs)]))
    known = set(made)
    _check_shapes(graph, known, "the inputs")
    values = graph.values
    for node in graph.nodes:
        for name in node.inputs:
            if name not in known:
                raise SchemaError(
                    f"node {node.name!r} ({node.operator}) uses {name!r}, which is neither an "
                    "input nor an output of an earlier node"
                )
        # Runs for every node, so the message is built only on error.
        if not all(name in values for name in node.outputs):
            _check_shapes(graph, node.outputs, f"node {node.name!r} ({node.operator})")
        known.update(node.outputs)
        check_dims(node, values)
    for output in graph.outputs:
        if output.name is not None and output.name not in known:
            raise SchemaError(f"the graph returns {output.name!r}, which nothing produces")
    _check_updates(graph)
    _check_contents(graph)
    check_precision(graph)
    _check_dims(graph)
    _check_preparation(graph)


def _check_updates(graph: Graph) -> None:
    """Check that outputs replace buffers, each once, and follow the results of forward."""
    updates = [output.updates is not None for output in graph.outputs]
    if updates != sorted(updates):
        raise SchemaError("outputs that update buffers must follow the results of forward")
    buffers = {i.name for i in graph.inputs if i.kind is InputKind.BUFFER}
    _check_unique("updated buffer", Counter(o.updates for o in graph.outputs if o.updates))
    for output in graph.outputs:
        if output.updates is None:
            continue
        if output.updates not in buffers or output.name is None:
            raise SchemaError(f"output {output.name!r} updates {output.updates!r}, not a buffer")
        old, new = graph.values[output.updates], graph.values[output.name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise SchemaError(f"{output.name!r} is {new}, and the buffer that it updates is {old}")


def _check_contents(graph: Graph) -> None:
    """Check that only constants have contents, of the size of their tensor."""
    for source in graph.inputs:
        if source.contents is None:
            continue
        tensor = graph.values[source.name] if source.kind is InputKind.CONSTANT else None
        if tensor is None or len(source.contents) != tensor.nbytes:
            raise SchemaError(
                f"{source.name!r} has contents of {len(source.contents)} bytes, but it is "
                f"{tensor or f'a {source.kind}'}"
            )


def check_precision(graph: Graph) -> None:
    """Check that only floating-point parameters have element types at rest and of reductions.

    Raises:
        SchemaError: another input has one, or it is not a floating-point type.
    """
    for source in graph.inputs:
        for dtype in (source.stored, source.reduced):
            if dtype is not None and not (
                source.kind is InputKind.PARAMETER
                and dtype.is_differentiable
                and graph.values[source.name].dtype.is_differentiable
            ):
                raise SchemaError(f"{source.name!r} cannot be stored or reduced as {dtype}")


def _check_dims(graph: Graph) -> None:
    """Check that only received tensors have factors of dims, whose products are their sizes."""
    for source in graph.inputs:
        if not source.dims:
            continue
        sizes = tuple(prod(size for size, _ in factors) for factors in source.dims)
        is_negative = any(size < 0 for factors in source.dims for size, _ in factors)
        is_received = source.kind is InputKind.RECEIVED
        if not is_received or is_negative or sizes != graph.values[source.name].shape:
            raise SchemaError(f"{source.name!r} has factors of dims of another tensor: {sizes}")


def _check_preparation(graph: Graph) -> None:
    """Check that the preparation has no inputs and produces exactly the prepared inputs."""
    taken = [i.name for i in graph.inputs if i.kind is InputKind.PREPARED]
    if graph.preparation is None:
        if taken:
            raise SchemaError(f"prepared input {taken[0]!r} is missing in the preparation")
        return
    made = [output.name for output in graph.preparation.outputs]
    if graph.preparation.inputs or made != taken:
        raise SchemaError(
            f"the preparation must have no inputs and return {taken}; it returns {made} from "
            f"{[i.name for i in graph.preparation.inputs]}"
        )
    for node in graph.preparation.nodes:
        if not may_prepare(node):
            raise SchemaError(
                f"node {node.name!r} ({node.operator}) of the preparation may differ between steps "
                f"or ranks"
            )
    check_wiring(graph.preparation)
    for name in taken:
        if graph.values[name] != graph.preparation.values[name]:
            raise SchemaError(
                f"{name!r} is {graph.values[name]} in the graph, but "
                f"{graph.preparation.values[name]} in the preparation"
            )


def _check_unique(what: str, counts: Counter[str]) -> None:
    name, count = next(iter(counts.most_common(1)), ("", 0))
    if count > 1:
        raise SchemaError(f"the {what} name {name!r} is used {count} times")


def _check_shapes(graph: Graph, names: "set[str] | tuple[str, ...]", maker: str) -> None:
    missing = sorted(name for name in names if name not in graph.values)
    if missing:
        raise SchemaError(f"{maker}: value {missing[0]!r} has no entry among the tensor values")


def check_document(graph: Graph, document: object) -> None:
    """Check a graph that was read from JSON.

    Args:
        graph: the graph.
        document: its JSON, for the paths of dynamic sizes.

    Raises:
        SchemaError: the graph is invalid: it has an unused entry in `values`, a nested preparation,
            rules that exceed the limits, or dynamic sizes that contradict the document.
    """
    for part in (graph, graph.preparation):
        if part is not None:
            _check_values(part)
            check_rules(part.rules)
    if graph.preparation is not None and graph.preparation.preparation is not None:
        raise SchemaError("preparation: a preparation must not have a preparation")
    if graph.dynamic is not None:
        _check_dynamic(graph.dynamic, document)
    check_wiring(graph)


def _check_values(graph: Graph) -> None:
    made = {n for node in graph.nodes for n in node.outputs}
    made |= {i.name for i in graph.inputs if i.kind is not InputKind.LITERAL}
    for name, tensor in graph.values.items():
        if name not in made:
            raise SchemaError(f"values[{name!r}]: no input or node produces this value")
        try:
            check_shape(tensor.shape, tensor.dtype)
        except SchemaError as error:
            raise SchemaError(f"values[{name!r}]: {error}") from None


def _check_dynamic(dynamic: Dynamic, document: object) -> None:
    planned = dynamic.planned
    numbers = (*planned.values(), *(factor for terms, _ in dynamic.sizes for factor, _ in terms))
    if any(abs(number) >= SIZE_LIMIT for number in numbers):
        raise SchemaError("dynamic: sizes are limited to 63 bits")
    _check_most(dynamic.conditions, MAX_CONDITIONS, "conditions")
    names = [*planned, *(formula.name for formula in dynamic.formulas)]
    _check_unique("dynamic size or formula", Counter(names))
    values = dynamic.values_at(planned)
    for terms, places in dynamic.sizes:
        if any(len(names) > MAX_FACTORS for _, names in terms):
            raise SchemaError(f"dynamic: a term has at most {MAX_FACTORS} symbols")
        if unknown := {name for _, names in terms for name in names} - values.keys():
            raise SchemaError(f"dynamic: unknown symbol {min(unknown)!r}")
        number = value_of(terms, values)
        for path in places:
            if not _are_equal(_at(document, path), number):
                raise SchemaError(f"the size at {'.'.join(map(str, path))} is not {number}")
    for condition in dynamic.conditions:
        if not evaluate(condition.expression, planned):
            raise SchemaError(f"dynamic: {condition.text:.80} is not true of the planned sizes")


def _at(document: Any, path: DocumentPath) -> object:
    try:
        for key in path:
            document = document[key]
    except (LookupError, TypeError):
        return None
    return document


def _are_equal(found: object, number: Number) -> bool:
    """True for equal numbers; floats may differ by the rounding of other machines' functions."""
    if isinstance(found, bool) or isinstance(number, bool):
        return found is number
    if isinstance(number, int):
        return found == number
    return isinstance(found, int | float) and isclose(found, number, rel_tol=_ROUNDING)


_ROUNDING = 1e-9


def check_rules(rules: Sequence[CallRule]) -> None:
    """Check the rules of a graph; their limits bound the size of the planner's problem.

    Raises:
        SchemaError: there are too many rules, one is inconsistent, or two are for the same calls.
    """
    _check_most(rules, MAX_RULES, "rules")
    seen = set()
    for i, rule in enumerate(rules):
        try:
            _check_rule(rule)
        except SchemaError as error:
            raise SchemaError(f"rules[{i}]: {rule.operator}: {error}") from None
        if rule.call in seen:
            raise SchemaError(
                f"rules[{i}]: there are two rules for the same calls of {rule.operator}"
            )
        seen.add(rule.call)


def _check_rule(rule: CallRule) -> None:
    letters = {letter for letter, _ in rule.sizes}
    _check_most(rule.sizes, MAX_LETTERS, "letters")
    _check_most(letters - rule.whole, MAX_FREE, "letters that may be sharded")
    _check_most(rule.linear, MAX_GROUPS, "linear groups")
    for letter, size in rule.sizes:
        if not letter.isalnum() or not 0 <= size <= MAX_TENSOR_BYTES:
            raise SchemaError(f"{letter!r} cannot be a letter of size {format_integer(size)}")
    if len(letters) < len(rule.sizes):
        raise SchemaError("a letter has two sizes")
    for listed in (rule.inputs, rule.outputs):
        _check_most(listed, MAX_TENSORS, "tensors")
    for dims in (*rule.inputs, *rule.outputs):
        _check_most(dims, MAX_LETTERS, "dims")
        used = [letter for dim in dims for letter in dim]
        if len(set(used)) < len(used) or not letters.issuperset(used):
            raise SchemaError(f"a tensor has dims of unknown or repeated letters: {used}")
    if not letters >= rule.contracted | rule.whole:
        raise SchemaError("'contracted' or 'whole' has an unknown letter")
    _check_pieces(rule, dict(rule.sizes))
    refs = [ref for _, argument in rule.arguments for ref in references(argument)]
    if any(ref.name for ref in refs):
        raise SchemaError("references in the arguments of a rule must have empty names")
    if not len(refs) == len(rule.inputs) == len(rule.dtypes):
        raise SchemaError(
            f"{len(refs)} tensors among the arguments do not match the inputs and dtypes"
        )
    _check_positions((*rule.linear, rule.addends), len(refs))
    _check_positions((rule.unaffected,), len(rule.outputs))


def _check_pieces(rule: CallRule, sizes: Mapping[str, int]) -> None:
    if len(dict(rule.pieces)) < len(rule.pieces):
        raise SchemaError("the pieces of a letter are given twice")
    for letter, pieces in rule.pieces:
        _check_most(pieces, MAX_TENSORS, "pieces")
        known = {letter, *(name for _, name in pieces if name is not None)}
        if not known <= rule.whole:
            raise SchemaError(f"letter {letter!r} or one of its pieces is unknown or not whole")
        total = sum(size for size, _ in pieces)
        if len(pieces) <= 1 or min(size for size, _ in pieces) < 1 or sizes[letter] % total:
            raise SchemaError(f"the pieces of letter {letter!r} do not divide it")
        unit = sizes[letter] // total
        if any(name is not None and sizes[name] != size * unit for size, name in pieces):
            raise SchemaError(f"a piece of letter {letter!r} has another size than its own letter")


def _check_positions(groups: Iterable[frozenset[int]], count: int) -> None:
    if any(not 0 <= position < count for group in groups for position in group):
        raise SchemaError(f"a position is not among the {count} tensors")


def _check_most(items: Sequence[object] | frozenset[str] | set[str], limit: int, what: str) -> None:
    if len(items) > limit:
        raise SchemaError(f"{len(items)} {what} are more than the limit of {limit}")
