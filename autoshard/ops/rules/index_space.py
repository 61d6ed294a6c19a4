"""Builder of operator rules: allocates the index letters of a call."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from math import prod

from autoshard.errors import SchemaError
from autoshard.graph import CallRule, Tensor
from autoshard.layouts import relative_sizes
from autoshard.ops.rules.collectives import NO_REDUCTIONS, Reductions
from autoshard.ops.rules.rule import Dims, OperatorRule, Pieces, lone_letters
from autoshard.ops.rules.spec import Call
from autoshard.ops.rules.strides import Shape


class IndexSpace:
    """Allocates letters for the dims of one call, and builds its rule.

    Args:
        call: the call that the rule is for.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._sizes: dict[str, int] = {}
        self._whole: set[str] = set()
        self._pieces: dict[str, Pieces] = {}
        self._ordered: set[str] = set()
        self._names = (f"d{i}" for i in count())

    def free(self, size: int) -> tuple[str, ...]:
        """Return new letters of a dim that may be sharded."""
        if size == 1:
            return ()
        letter = next(self._names)
        self._sizes[letter] = size
        return (letter,)

    def fixed(self, size: int) -> tuple[str, ...]:
        """Return new letters of a dim that must not be sharded."""
        letters = self.free(size)
        self._whole.update(letters)
        return letters

    def in_order(self, letters: tuple[str, ...]) -> tuple[str, ...]:
        """Mark letters of which a rank must know its first global index; returns them."""
        self._ordered.update(letters)
        return letters

    def joined(
        self, sizes: Sequence[int], *, taken: Collection[int] | None = None
    ) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return new letters of a dim that concatenates pieces, and of each piece.

        They have interleaved shards only, with sub-shards that fit the pieces.

        Args:
            sizes: sizes of the pieces; a piece may be empty.
            taken: the pieces that are a dim of some tensor; None for all.
        """
        present = [size for size in sizes if size]
        if len(present) == 1:
            whole = self.free(present[0])
            return whole, [whole if size else self.fixed(0) for size in sizes]
        whole = self.fixed(sum(sizes))
        letters = [
            self.fixed(size) if taken is None or i in taken else () for i, size in enumerate(sizes)
        ]
        if present and min(present) > 1:
            names = [next(iter(x), None) for x, size in zip(letters, sizes, strict=True) if size]
            self._pieces[whole[0]] = tuple(zip(relative_sizes(present), names, strict=True))
        return whole, letters

    def free_dims(self, shape: Shape, *, fixed: Collection[int] = ()) -> Dims:
        """New letters for every dim of a tensor; those in `fixed` must not be sharded."""
        return tuple(
            self.fixed(size) if dim in fixed else self.free(size) for dim, size in enumerate(shape)
        )

    def fixed_dims(self, shape: Shape) -> Dims:
        """New letters for every dim of a tensor, none of which may be sharded."""
        return tuple(self.fixed(size) for size in shape)

    def rule(
        self,
        inputs: Iterable[Dims],
        outputs: Iterable[Dims],
        *,
        contracted: Iterable[str] = (),
        linear: Iterable[Collection[int]] = (),
        addends: Iterable[int] = (),
        unaffected: Iterable[int] = (),
        reduced: Reductions = NO_REDUCTIONS,
        causal: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
        flops: float = 0.0,
    ) -> OperatorRule:
        """Build the rule; linear groups with integer tensors are left out.

        Args:
            inputs: letters of each input.
            outputs: letters of each output.
            contracted: letters that are summed over.
            linear: groups of inputs in which the operator is jointly linear.
            addends: inputs that are added to a contraction.
            unaffected: outputs that stay replicated when a letter that they lack is sharded.
            reduced: reductions that ranks run inside when a letter is sharded.
            causal: rows and columns, if a row uses the columns up to its own index only.
            flops: floating-point operations of the whole call.
        """
        taken, made = tuple(inputs), tuple(outputs)  # generators allocate letters only now
        return OperatorRule(
            sizes=dict(self._sizes),
            inputs=taken,
            outputs=made,
            contracted=frozenset(contracted),
            whole=frozenset(self._whole),
            linear=differentiable_groups(self._call, linear),
            addends=frozenset(addends),
            unaffected=frozenset(unaffected),
            reduced=reduced,
            pieces=self._pieces,
            ordered=frozenset(self._ordered),
            causal=(causal[0][0], causal[1][0]) if all(causal) else None,
            uneven=lone_letters((*taken, *made)) - self._whole,
            flops_per_point=flops / max(prod(self._sizes.values()), 1),
        )


def replicated(call: Call) -> OperatorRule:
    """Rule without sharding, valid for every deterministic operator."""
    space = IndexSpace(call)
    return space.rule(
        [space.fixed_dims(tensor.shape) for tensor in call.inputs],
        [space.fixed_dims(tensor.shape) for tensor in call.outputs],
    )


def along_dims(
    call: Call, dims: Collection[int], *, linear: Iterable[Collection[int]] = ()
) -> OperatorRule:
    """Rule of an operator that works along some dims, which stay whole, and is batched over others.

    All inputs and outputs have the same number of dims, and the same sizes in the other dims.
    """
    space = IndexSpace(call)
    shared = space.free_dims(call.inputs[0].shape, fixed=dims)

    def letters(tensor: Tensor) -> Dims:
        return tuple(
            space.fixed(size) if dim in dims else shared[dim]
            for dim, size in enumerate(tensor.shape)
        )

    inputs = [shared, *map(letters, call.inputs[1:])]
    return space.rule(inputs, [letters(tensor) for tensor in call.outputs], linear=linear)


def operator_rule(call: Call, rule: CallRule) -> OperatorRule:
    """Convert a rule in the graph (custom or discovered) to the rule of a call.

    Raises:
        ValueError: its letters do not match the shapes of the call.
    """
    sizes = dict(rule.sizes)
    tensors = (*call.inputs, *call.outputs)
    for tensor, dims in zip(tensors, (*rule.inputs, *rule.outputs), strict=True):
        shape = tuple(prod(sizes[letter] for letter in letters) for letters in dims)
        if shape != tensor.shape:
            raise ValueError(
                f"its rule in the graph is for the shape {list(shape)}, not {list(tensor.shape)}"
            )
    pieces = dict(rule.pieces)
    interleaved = {*pieces, *(name for own in pieces.values() for _, name in own)}
    return OperatorRule(
        sizes=sizes,
        inputs=rule.inputs,
        outputs=rule.outputs,
        contracted=rule.contracted,
        whole=rule.whole,
        linear=differentiable_groups(call, rule.linear),
        addends=rule.addends,
        unaffected=rule.unaffected,
        # Of other letters, discovery tries contiguous shards only.
        ordered=frozenset(sizes) - interleaved,
        pieces=pieces,
    )


def differentiable_groups(
    call: Call, groups: Iterable[Collection[int]]
) -> tuple[frozenset[int], ...]:
    """The groups of inputs that can all be partial, if the outputs can: floating-point tensors."""

    def can_be_partial(tensors: Iterable[Tensor]) -> bool:
        return all(tensor.dtype.is_differentiable for tensor in tensors)

    if not can_be_partial(call.outputs):
        return ()
    return tuple(
        frozenset(group)
        for group in groups
        if group and can_be_partial(call.inputs[i] for i in group)
    )


def broadcast(dims: Dims, shape: Shape) -> Dims:
    """Letters of a tensor that broadcasts to dims, aligned at the last dim."""
    aligned = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else letters for size, letters in zip(shape, aligned, strict=True))


def einsum(
    call: Call,
    patterns: Mapping[str, str] | Sequence[str],
    output: str,
    *,
    whole: str = "",
    addends: Collection[str] = (),
    constants: Collection[str] = (),
    ordered: str = "",
    even: str = "",
    flops_per_point: float = 2.0,
) -> OperatorRule:
    """Rule of a product of tensors, summed over the letters that the output lacks.

    Args:
        call: the call.
        patterns: letters of each tensor, one per dim, by schema name or by position. `*`
            stands for any number of dims that broadcast. A tensor with fewer dims than
            letters is aligned at the last.
        output: letters of the output.
        whole: letters that must not be sharded.
        addends: arguments that are added to the product.
        constants: arguments in which the product is not linear.
        ordered: letters of which a rank must know its first global index.
        even: letters that must be sharded evenly.
        flops_per_point: floating-point operations per point of the iteration space.
    """
    sizes: dict[str, int] = {}
    if isinstance(patterns, Mapping):
        patterns = [patterns[name] for name in call.names]
    inputs = [
        _bind(pattern, tensor.shape, sizes)
        for pattern, tensor in zip(patterns, call.inputs, strict=True)
    ]
    added = [i for i, name in enumerate(call.names) if name in addends]
    factors = [
        i for i, name in enumerate(call.names) if name not in addends and name not in constants
    ]
    outputs = [_bind(output, tensor.shape, sizes) for tensor in call.outputs]
    return OperatorRule(
        sizes=sizes,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        contracted=frozenset(letter for letter in sizes if letter[0] not in output),
        whole=frozenset(whole) & sizes.keys(),
        linear=differentiable_groups(call, [{i, *added} for i in factors]),
        addends=frozenset(added),
        ordered=frozenset(ordered),
        uneven=lone_letters((*inputs, *outputs)) - frozenset(whole + even),
        flops_per_point=flops_per_point,
    )


def _bind(pattern: str, shape: Shape, sizes: dict[str, int]) -> Dims:
    if "*" in pattern:
        head, tail = pattern.split("*")
        stars = [f"*{i}" for i in reversed(range(len(shape) - len(head) - len(tail)))]
        letters = [*head, *stars, *tail]
    else:
        letters = list(pattern[len(pattern) - len(shape) :])
    dims = []
    for letter, size in zip(letters, shape, strict=True):
        if size != 1 and sizes.setdefault(letter, size) != size:
            raise SchemaError(f"dims of sizes {size} and {sizes[letter]} should be equal")
        dims.append(() if size == 1 else (letter,))
    return tuple(dims)
