"""The proof that a rule is true: run every rank in one process and put the pieces together."""

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import torch

from autoshard.graph import Argument, DType, Node, Ref, Tensor, Token, TokenKind
from autoshard.layouts import Kind, Layout, S
from autoshard.rules import (
    Call,
    InnerCollective,
    Operation,
    OperatorRule,
    Strategy,
    rule_for,
    strategies,
)
from autoshard.runtime.kernels import bind_kernel
from autoshard.runtime.local_node import LocalNode, NoRanks, Place
from autoshard.runtime.slices import own_shape

MESHES = ((2,), (4,), (3,), (2, 2))
STRATEGIES_PER_MESH = 20
TIMEOUT = 30.0
"""Seconds that a rank waits for another one that may hang."""
CHUNKINGS = ((1, 1), (1, 1, 1), (2, 1, 1), (1, 2))
CHUNKED_PER_MESH = 4

Coordinate = tuple[int, ...]
Pieces = Mapping[Coordinate, torch.Tensor]

CONSTANTS = {
    ("aten.batch_norm.default", "running_mean"),
    ("aten.batch_norm.default", "running_var"),
    ("aten.cross_entropy_loss.default", "weight"),
    ("aten.nll_loss_nd.default", "weight"),
    ("aten.binary_cross_entropy_with_logits.default", "weight"),
    ("aten.binary_cross_entropy_with_logits.default", "pos_weight"),
}
"""Floating-point arguments that have no derivative."""

SAME, SUM, SLICE = "same", "sum", "slice"
VALUE = {Kind.INVARIANT: SAME, Kind.REPLICATE: SAME, Kind.SHARD: SLICE, Kind.PARTIAL: SUM}
GRADIENT = {Kind.INVARIANT: SAME, Kind.REPLICATE: SUM, Kind.SHARD: SLICE, Kind.PARTIAL: SAME}


@dataclass(frozen=True)
class Example:
    """A call with real tensors."""

    call: Call
    values: tuple[torch.Tensor, ...]

    @property
    def operator(self) -> Any:
        namespace, packet, overload = self.call.operator.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def run(
        self, values: tuple[torch.Tensor, ...], replaced: Mapping[str, Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        fresh = iter(values)
        arguments = {key: _concrete(value, fresh) for key, value in self.call.arguments}
        return _flat(self.operator(**(arguments | dict(replaced or {}))))


def make_example(operator: str, **arguments: Any) -> Example:
    namespace, packet, overload = operator.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
    names = [argument.name for argument in schema.arguments]
    values: list[torch.Tensor] = []
    ordered = sorted(arguments.items(), key=lambda item: names.index(item[0]))
    abstract = tuple((key, _abstract(value, values)) for key, value in ordered)
    example = Example(Call(operator, abstract, (), ()), tuple(values))
    outputs = example.run(tuple(values))
    call = Call(operator, abstract, tuple(map(spec, values)), tuple(map(spec, outputs)))
    return Example(call, tuple(values))


def spec(tensor: torch.Tensor) -> Tensor:
    dtype = DType(str(tensor.dtype).removeprefix("torch."))
    return Tensor(tuple(tensor.shape), dtype, dtype.is_differentiable)


def _abstract(value: Any, values: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        values.append(value)
        return Ref(f"v{len(values)}")
    if isinstance(value, (list, tuple)):
        return tuple(_abstract(item, values) for item in value)
    if isinstance(value, torch.dtype):
        return Token(TokenKind.DTYPE, str(value).removeprefix("torch."))
    return value


def _concrete(argument: Argument, values: Any) -> Any:
    if isinstance(argument, Ref):
        return next(values)
    if isinstance(argument, tuple):
        return [_concrete(item, values) for item in argument]
    if isinstance(argument, Token):
        return getattr(torch, argument.value)
    return argument


def _flat(outputs: Any) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def slice_of(
    layout: Layout, shape: tuple[int, ...], mesh: tuple[int, ...], at: Coordinate
) -> tuple[Any, ...]:
    """Where a rank's slices lie in the whole tensor, as indices."""
    held = []
    for dim, size in enumerate(shape):
        chunks = layout.chunks(dim) or (1,)
        places = np.split(np.arange(size), [size * n // sum(chunks) for n in np.cumsum(chunks)])
        for axis in layout.cutting_axes(dim):
            places = [share_of(chunk, mesh[axis], at[axis]) for chunk in places]
        held.append(np.concatenate(places))
    return np.ix_(*held)


def share_of(places: np.ndarray, num_ranks: int, rank: int) -> np.ndarray:
    """A rank's share as `torch.chunk` gives it; none is empty."""
    shares = torch.from_numpy(places).chunk(num_ranks)
    assert len(shares) == num_ranks
    return shares[rank].numpy()


PlaceOf = Callable[[Layout, tuple[int, ...], tuple[int, ...], Coordinate], tuple[Any, ...]]


def distribute(
    tensor: torch.Tensor,
    layout: Layout,
    mesh: tuple[int, ...],
    kinds: Mapping[Kind, str],
    place_of: PlaceOf = slice_of,
) -> dict[Coordinate, torch.Tensor]:
    """A whole tensor as the ranks hold it; what is to be summed is split at random."""
    split = [a for a, t in enumerate(layout.types) if kinds[t.kind] == SUM]
    terms = [torch.randn_like(tensor) for _ in range(prod(mesh[a] for a in split) - 1)]
    terms.append(tensor - sum(terms) if terms else tensor)
    by_term = dict(zip(product(*(range(mesh[a]) for a in split)), terms, strict=True))
    shape = tuple(tensor.shape)
    return {
        at: by_term[tuple(at[a] for a in split)][place_of(layout, shape, mesh, at)].clone()
        for at in product(*map(range, mesh))
    }


def assemble(
    pieces: Pieces,
    layout: Layout,
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    kinds: Mapping[Kind, str],
    *,
    place_of: PlaceOf = slice_of,
) -> torch.Tensor:
    """The whole tensor that the ranks hold; copies are checked to agree."""
    whole = torch.zeros(shape, dtype=pieces[(0,) * len(mesh)].dtype)
    same = [a for a, t in enumerate(layout.types) if kinds[t.kind] == SAME]
    for at, piece in pieces.items():
        place = place_of(layout, shape, mesh, at)
        assert whole[place].shape == piece.shape, "a rank's result has another shape"
        first = tuple(0 if axis in same else i for axis, i in enumerate(at))
        assert_close(piece, pieces[first])
        if at == first:
            whole[place] += piece
    return whole


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual is expected or torch.equal(actual, expected):
        return
    assert actual.dtype.is_floating_point or actual.dtype.is_complex
    tolerance = 1e-4 if actual.dtype == torch.float32 else 1e-10
    assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@dataclass(frozen=True)
class Simulation:
    """One strategy of an example on a mesh."""

    example: Example
    strategy: Strategy
    mesh: tuple[int, ...]

    def check(self) -> None:
        call = self.example.call
        whole = self._tracked(self.example.values)
        expected = self.example.run(whole)
        local_inputs = self._scatter(self.example.values, self.strategy.inputs, VALUE)
        local_inputs = {at: self._tracked(values) for at, values in local_inputs.items()}
        ranks = list(product(*map(range, self.mesh)))
        together = Together(self.mesh)
        local_outputs = self._on_ranks(
            together, lambda at: self.run_rank(at, local_inputs[at], together)
        )
        for i, (layout, tensor) in enumerate(zip(self.strategy.outputs, expected, strict=True)):
            pieces = {at: local_outputs[at][i].detach() for at in ranks}
            actual = self._assemble(pieces, layout, call.outputs[i].shape, VALUE)
            assert_close(actual, tensor.detach())
        self._check_gradients(whole, expected, local_inputs, local_outputs, together)
        expected_runs = tuple(replace(c, copied=0) for c in self.strategy.collectives)
        assert together.ran == expected_runs, "other collectives than the rule says"

    def _on_ranks(self, together: "Together", run: Callable[[Coordinate], Any]) -> Any:
        """What every rank makes; ranks that meet inside the operator run at the same time."""
        ranks = list(product(*map(range, self.mesh)))
        if not self.strategy.collectives:
            return {at: run(at) for at in ranks}
        with ThreadPoolExecutor(len(ranks)) as threads:
            made = {at: threads.submit(together.guard(run), at) for at in ranks}
        errors = [e for e in (future.exception() for future in made.values()) if e]
        for error in sorted(errors, key=lambda e: isinstance(e, BrokenBarrierError)):
            raise error
        return {at: future.result() for at, future in made.items()}

    def _check_gradients(
        self,
        whole: Any,
        expected: Any,
        local_inputs: Any,
        local_outputs: Any,
        together: "Together",
    ) -> None:
        made = [i for i, tensor in enumerate(expected) if tensor.requires_grad]
        used = [i for i, tensor in enumerate(whole) if tensor.requires_grad]
        if not made:
            return
        cotangents = [torch.randn_like(expected[i]) for i in made]
        layouts = [self.strategy.outputs[i] for i in made]
        local_cotangents = self._scatter(cotangents, layouts, GRADIENT)
        gradients = _gradients(expected, whole, cotangents, made, used)
        together.backward = True
        local = self._on_ranks(
            together,
            lambda at: _gradients(
                local_outputs[at], local_inputs[at], local_cotangents[at], made, used
            ),
        )
        for place, i in enumerate(used):
            pieces = {at: local[at][place] for at in local}
            layout, shape = self.strategy.inputs[i], tuple(whole[i].shape)
            actual = self._assemble(pieces, layout, shape, GRADIENT)
            assert_close(actual, gradients[place])

    def _scatter(self, tensors: Any, layouts: Any, kinds: Any) -> Any:
        parts = [
            self._distribute(tensor, layout, kinds)
            for tensor, layout in zip(tensors, layouts, strict=True)
        ]
        return {at: tuple(part[at] for part in parts) for at in product(*map(range, self.mesh))}

    def _distribute(self, tensor: torch.Tensor, layout: Layout, kinds: Mapping[Kind, str]) -> Any:
        return distribute(tensor, layout, self.mesh, kinds)

    def _assemble(
        self, pieces: Pieces, layout: Layout, shape: tuple[int, ...], kinds: Mapping[Kind, str]
    ) -> torch.Tensor:
        return assemble(pieces, layout, self.mesh, shape, kinds)

    def _tracked(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        call = self.example.call
        return tuple(
            value.detach()
            .clone()
            .requires_grad_(
                spec(value).dtype.is_differentiable and (call.operator, name) not in CONSTANTS
            )
            for name, value in zip(call.names, values, strict=True)
        )

    def run_rank(
        self,
        at: Coordinate,
        values: tuple[torch.Tensor, ...],
        together: "Together | None" = None,
    ) -> tuple[torch.Tensor, ...]:
        """What the runtime runs on a rank."""
        call, strategy = self.example.call, self.strategy
        made = tuple(f"out{i}" for i in range(len(call.outputs)))
        local = LocalNode(
            node=Node("node", call.operator, call.arguments, made),
            inputs=strategy.inputs,
            outputs=strategy.outputs,
            shapes=tuple(tensor.shape for tensor in call.inputs),
            input_shapes=self._local_shapes(strategy.inputs, call.inputs, at),
            output_shapes=self._local_shapes(strategy.outputs, call.outputs, at),
            place=Place(
                self.mesh,
                at,
                torch.device("cpu"),
                ranks=NoRanks() if together is None else RankOf(together, at),
            ),
        )
        return bind_kernel(local)(values, 0)

    def _local_shapes(
        self, layouts: Sequence[Layout], tensors: Sequence[Tensor], at: Coordinate
    ) -> tuple[tuple[int, ...], ...]:
        return tuple(
            own_shape(tensor.shape, layout, self.mesh, at)
            for layout, tensor in zip(layouts, tensors, strict=True)
        )


class Together:
    """Ranks as threads, which meet at every collective.

    Attributes:
        ran: the collectives that the first rank has taken part in.
        backward: whether they run in the backward pass.
    """

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.backward = False
        self.ran: tuple[InnerCollective, ...] = ()
        self._barrier = Barrier(prod(mesh), timeout=TIMEOUT)
        self._given: dict[Coordinate, torch.Tensor] = {}
        self._sent: dict[Coordinate, tuple[torch.Tensor, ...]] = {}

    def guard(self, run: Callable[[Coordinate], Any]) -> Callable[[Coordinate], Any]:
        """Nobody waits for a rank that has failed."""

        def guarded(at: Coordinate) -> Any:
            try:
                return run(at)
            except BaseException:
                self._barrier.abort()
                raise

        return guarded

    def all_reduce(
        self, at: Coordinate, tensor: torch.Tensor, axis: int, operation: Operation
    ) -> None:
        assert tensor.is_contiguous()
        self._given[at] = tensor.detach().clone()
        self._barrier.wait()
        parts = [self._given[other] for other in self._given if _differ_on(axis, at, other)]
        whole = torch.stack(parts)
        tensor.copy_(whole.sum(0) if operation is Operation.SUM else whole.amax(0))
        if not any(at):
            made = InnerCollective(axis, operation, tensor.nbytes, self.backward)
            self.ran = (*self.ran, made)
        self._barrier.wait()

    def all_to_all(
        self, at: Coordinate, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """Counts what all ranks send, on average."""
        self._sent[at] = torch.split(rows.detach().clone(), sent)
        self._barrier.wait()
        others = sorted(other for other in self._sent if _differ_on(axis, at, other))
        parts = [self._sent[other][at[axis]] for other in others]
        assert [len(part) for part in parts] == received
        if not any(at):
            total = sum(part.nbytes for parts in self._sent.values() for part in parts)
            assert total % len(self._sent) == 0
            nbytes = total // len(self._sent)
            made = InnerCollective(axis, Operation.MOVE, nbytes, self.backward)
            self.ran = (*self.ran, made)
        self._barrier.wait()
        return torch.cat(parts)

    def exchange(
        self, at: Coordinate, to_before: torch.Tensor, to_after: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Counts what the rank sends or receives that does most."""
        assert to_before.is_contiguous()
        assert to_after.is_contiguous()
        self._sent[at] = (to_before.detach().clone(), to_after.detach().clone())
        self._barrier.wait()
        line = sorted(other for other in self._sent if _differ_on(axis, at, other))
        place = line.index(at)
        before = self._sent[line[place - 1]][1] if place else None
        behind = self._sent[line[place + 1]][0] if place + 1 < len(line) else None
        assert before is None or before.shape == to_after.shape
        assert behind is None or behind.shape == to_before.shape
        if not any(at):
            edges = (to_before.nbytes, to_after.nbytes)
            nbytes = max(edges) if len(line) == 2 else sum(edges)  # both are ends
            made = InnerCollective(axis, Operation.HALO, nbytes, self.backward)
            self.ran = (*self.ran, made)
        self._barrier.wait()
        return before, behind


def _differ_on(axis: int, one: Coordinate, other: Coordinate) -> bool:
    """Whether two ranks differ on this axis at most."""
    return all(a == b for i, (a, b) in enumerate(zip(one, other, strict=True)) if i != axis)


@dataclass(frozen=True)
class RankOf:
    """One of the threads."""

    together: Together
    at: Coordinate

    def all_reduce(self, tensor: torch.Tensor, axis: int, operation: Operation) -> None:
        self.together.all_reduce(self.at, tensor, axis, operation)

    def all_to_all(
        self, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        return self.together.all_to_all(self.at, rows, axis, sent, received)

    def exchange(
        self, to_before: torch.Tensor, to_after: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.together.exchange(self.at, to_before, to_after, axis)


def _gradients(
    outputs: Any, inputs: Any, cotangents: Any, made: list[int], used: list[int]
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(
        [outputs[i] for i in made],
        [inputs[i] for i in used],
        list(cotangents),
        allow_unused=True,
        materialize_grads=True,
    )


def check_sizes(call: Call, rule: OperatorRule) -> None:
    """The letters of each dim multiply to its size."""
    tensors = (*call.inputs, *call.outputs)
    for tensor, dims in zip(tensors, (*rule.inputs, *rule.outputs), strict=True):
        for size, letters in zip(tensor.shape, dims, strict=True):
            assert prod(rule.sizes[letter] for letter in letters) == (size if letters else 1)


def prove_rule(
    example: Example,
    rule: OperatorRule | None = None,
    *,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    simulation: type[Simulation] = Simulation,
) -> set[str]:
    """Check strategies of an example on every mesh; returns those of equal slices on 2 ranks."""
    rule = rule or rule_for(example.call)
    check_sizes(example.call, rule)
    torch.default_generator.manual_seed(0)
    for mesh in meshes:
        found = strategies(rule, mesh)
        if len(mesh) > 1 and len(found) > STRATEGIES_PER_MESH:
            found = tuple(random.Random(0).sample(found, STRATEGIES_PER_MESH))
        for strategy in (*found, *_in_chunks(example.call, rule, mesh)):
            try:
                simulation(example, strategy, mesh).check()
            except (AssertionError, RuntimeError, IndexError) as error:
                raise AssertionError(f"{strategy} on {mesh} is wrong: {error}") from error
    return {str(strategy) for strategy in strategies(replace(rule, uneven=frozenset()), (2,))}


def _in_chunks(call: Call, rule: OperatorRule, mesh: tuple[int, ...]) -> list[Strategy]:
    """Strategies that cut something in chunks, of some chunkings that a graph could ask for."""
    chunked = [
        [S(dim, chunks) for dim in range(len(tensor.shape)) for chunks in CHUNKINGS]
        for tensor in (*call.inputs, *call.outputs)
    ]
    found = [
        strategy
        for strategy in strategies(rule, mesh, chunked=chunked)
        if any(t.chunks for x in (*strategy.inputs, *strategy.outputs) for t in x.types)
    ]
    return random.Random(0).sample(found, min(CHUNKED_PER_MESH, len(found)))
