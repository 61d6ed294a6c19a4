"""The proof that a rule is true: run every rank in one process and put the pieces together."""

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from threading import BrokenBarrierError
from typing import Any

import torch
from ops.calls import Example, spec
from ops.pieces import (
    GRADIENT,
    VALUE,
    Coordinate,
    Pieces,
    assemble,
    assert_close,
    distribute,
)
from ops.rank_threads import RankOf, Together

from autoshard.graph import Node, Tensor
from autoshard.layouts import Kind, Layout, S
from autoshard.ops import (
    Call,
    OperatorRule,
    Strategy,
    rule_for,
    strategies,
)
from autoshard.runtime.program.kernels import bind_kernel
from autoshard.runtime.program.local_node import LocalNode, Place, Ranks
from autoshard.runtime.shards import local_shape

MESHES = ((2,), (4,), (3,), (2, 2))
STRATEGIES_PER_MESH = 20
SUB_SHARDS = ((1, 1), (1, 1, 1), (2, 1, 1), (1, 2))
INTERLEAVED_PER_MESH = 4

CONSTANTS = {
    ("aten.batch_norm.default", "running_mean"),
    ("aten.batch_norm.default", "running_var"),
    ("aten.cross_entropy_loss.default", "weight"),
    ("aten.nll_loss_nd.default", "weight"),
    ("aten.binary_cross_entropy_with_logits.default", "weight"),
    ("aten.binary_cross_entropy_with_logits.default", "pos_weight"),
}
"""Floating-point arguments that have no derivative."""


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
                ranks=Ranks() if together is None else RankOf(together, at),
            ),
        )
        return bind_kernel(local)(values, 0)

    def _local_shapes(
        self, layouts: Sequence[Layout], tensors: Sequence[Tensor], at: Coordinate
    ) -> tuple[tuple[int, ...], ...]:
        return tuple(
            local_shape(tensor.shape, layout, self.mesh, at)
            for layout, tensor in zip(layouts, tensors, strict=True)
        )


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
        for strategy in (*found, *_interleaved(example.call, rule, mesh)):
            try:
                simulation(example, strategy, mesh).check()
            except (AssertionError, RuntimeError, IndexError) as error:
                raise AssertionError(f"{strategy} on {mesh} is wrong: {error}") from error
    return {str(strategy) for strategy in strategies(replace(rule, uneven=frozenset()), (2,))}


def _interleaved(call: Call, rule: OperatorRule, mesh: tuple[int, ...]) -> list[Strategy]:
    """Interleaved strategies, with some sub-shards that a graph could ask for."""
    interleaved = [
        [S(dim, sub_shards) for dim in range(len(tensor.shape)) for sub_shards in SUB_SHARDS]
        for tensor in (*call.inputs, *call.outputs)
    ]
    found = [
        strategy
        for strategy in strategies(rule, mesh, interleaved=interleaved)
        if any(t.sub_shards for x in (*strategy.inputs, *strategy.outputs) for t in x.types)
    ]
    return random.Random(0).sample(found, min(INTERLEAVED_PER_MESH, len(found)))
