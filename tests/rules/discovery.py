"""What one axis of two ranks may do to an operator, found by trying.

Inputs are cut or split in every combination of types, run on two simulated ranks and compared
with the whole, forward and backward. What holds for these numbers must hold for the same
numbers in another order too.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from rules.simulation import CONSTANTS, Example

from autoshard.graph import Node
from autoshard.layouts import AxisType, I, Layout, P, R, S
from autoshard.rules import Kernel, OperatorRule, axis_rules, kernel_for, rule_for
from autoshard.runtime.kernels import LocalNode, Place, bind_kernel

Types = tuple[AxisType, ...]
Tensors = Sequence[torch.Tensor]
PerRank = Sequence[Tensors]

COMBINATIONS = 300
"""Combinations of input types that are tried for one example; of more, a sample."""

LOOKS_AT_OUTPUT = {Kernel.RESIZE, Kernel.RESHAPE, Kernel.REPEAT, Kernel.SCALED}
"""Kernels that depend on the layout of the output."""

NOT_POSSIBLE = (RuntimeError, IndexError, ValueError, AssertionError)
"""What an operator says to local tensors that do not fit."""


@dataclass(frozen=True)
class Option:
    """Types of inputs and outputs on the axis; R where no gradient flows."""

    inputs: Types
    outputs: Types

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


def missing_options(example: Example, rule: OperatorRule | None = None) -> set[Option]:
    """What holds though the operator's rule, or the rule given, does not offer it."""
    trial = Trial(example)
    rules = list(axis_rules(rule or rule_for(example.call), 2))
    offered = {trial.canonical(Option(rule.inputs, rule.outputs)) for rule in rules}
    again = Trial(_shuffled(example))
    found: set[Option] = set()
    for inputs in _candidates(example, {rule.inputs for rule in rules}):
        options = trial.options(inputs) - offered
        if options:
            found |= options & again.options(inputs)
    return found


def _shuffled(example: Example) -> Example:
    """The numbers in another order; what counts or points stays where it is."""
    generator = torch.Generator().manual_seed(6)
    values = tuple(
        value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)
        if value.is_floating_point() or value.is_complex()
        else value
        for value in example.values
    )
    return replace(example, values=values)


UNCHECKED = {"aten._weight_norm.default", "aten.lstm.input", "aten.gru.input"}
"""Operators that do not check their tensors and would read and write beyond them."""


def _candidates(example: Example, offered: set[Types]) -> list[Types]:
    """Combinations of input types: all, or the neighbours of what is offered and of R."""
    unchecked = example.call.operator in UNCHECKED
    choices = [[R, P] if unchecked else _types(value) for value in example.values]
    whole = (R,) * len(choices)
    if prod(map(len, choices)) <= COMBINATIONS:
        return [types for types in product(*choices) if types != whole]
    starts = sorted({tuple(R if t is I else t for t in types) for types in offered}, key=str)
    near = {
        (*types[:i], choice, *types[i + 1 :])
        for types in starts
        for i, options in enumerate(choices)
        for choice in options
    }
    ordered = sorted(near - {whole}, key=str)
    return random.Random(0).sample(ordered, min(COMBINATIONS, len(ordered)))


def _types(value: torch.Tensor) -> list[AxisType]:
    """What an axis may do to a value; R stands for the same on both ranks."""
    cuts = [S(dim) for dim, size in enumerate(value.shape) if size and size % 2 == 0]
    return [R, *cuts, *([P] if value.is_floating_point() or value.is_complex() else [])]


class Trial:
    """One example with fixed numbers, whole."""

    def __init__(self, example: Example) -> None:
        self.example = example
        call = example.call
        self.generator = torch.Generator().manual_seed(5)
        self.needs = [
            tensor.dtype.is_differentiable and (call.operator, name) not in CONSTANTS
            for name, tensor in zip(call.names, call.inputs, strict=True)
        ]
        inputs = self.tracked(example.values)
        self.outputs = example.run(inputs)
        self.made = [i for i, output in enumerate(self.outputs) if output.requires_grad]
        self.cotangents = {i: self.random_like(self.outputs[i]) for i in self.made}
        self.gradients = self.backward(self.outputs, inputs, self.cotangents)

    def canonical(self, option: Option) -> Option:
        """R in place of I where no gradient flows."""
        inputs = (t if t is not I or self._flows(i) else R for i, t in enumerate(option.inputs))
        outputs = (t if t is not I or i in self.made else R for i, t in enumerate(option.outputs))
        return Option(tuple(inputs), tuple(outputs))

    def _flows(self, position: int) -> bool:
        return position in self.gradients and bool(self.gradients[position].any())

    def options(self, inputs: Types) -> set[Option]:
        """What holds with these types of inputs."""
        ranks = [self.tracked(values) for values in self.split_all(self.example.values, inputs)]
        found: set[Option] = set()
        for run in self.runs(inputs, ranks):
            choices = [
                _matching(whole, [outputs[i] for outputs in run])
                for i, whole in enumerate(self.outputs)
            ]
            for outputs in product(*map(self._with_gradient, range(len(choices)), choices)):
                taken = self._inputs_after_backward(inputs, outputs, ranks, run)
                if taken is not None:
                    found.add(Option(taken, outputs))
        return found

    def runs(self, inputs: Types, ranks: PerRank) -> Iterator[PerRank]:
        """What both ranks make, for each layout of the output that the kernel may look at."""
        call = self.example.call
        looks = kernel_for(call.operator).kind in LOOKS_AT_OUTPUT
        for first in _types(self.outputs[0]) if looks else [R]:
            try:
                yield [self.run_rank(rank, inputs, first, ranks[rank]) for rank in (0, 1)]
            except NOT_POSSIBLE:
                continue

    def run_rank(self, rank: int, inputs: Types, output: AxisType, values: Tensors) -> Tensors:
        call = self.example.call
        made = tuple(f"out{i}" for i in range(len(call.outputs)))
        layout = Layout((output,))
        local = LocalNode(
            node=Node("node", call.operator, call.arguments, made),
            inputs=tuple(Layout((axis_type,)) for axis_type in inputs),
            outputs=(layout,) * len(made),
            input_shapes=tuple(tuple(value.shape) for value in values),
            output_shapes=(
                layout.local_shape(call.outputs[0].shape, (2,)),
                *(tensor.shape for tensor in call.outputs[1:]),
            ),
            place=Place((2,), (rank,), torch.device("cpu")),
        )
        return bind_kernel(local)(values, 0)

    def _with_gradient(self, output: int, kinds: list[AxisType]) -> list[AxisType]:
        return [I, *kinds] if R in kinds and output in self.made else kinds

    def _inputs_after_backward(
        self, inputs: Types, outputs: Types, ranks: PerRank, run: PerRank
    ) -> Types | None:
        """The types of inputs that their gradients have; None if one has none of them."""
        if any(made[i].requires_grad is False for made in run for i in self.made):
            return None
        parts = {
            i: self.split(self.cotangents[i], _GRADIENT.get(outputs[i], outputs[i]))
            for i in self.made
        }
        local = [
            self.backward(made, values, {i: part[rank] for i, part in parts.items()})
            for rank, (made, values) in enumerate(zip(run, ranks, strict=True))
        ]
        taken = list(inputs)
        for i, whole in self.gradients.items():
            matching = _matching(whole, [gradients[i] for gradients in local])
            able = (R, I) if inputs[i] is R else (inputs[i],)
            fits = [t for t in able if _GRADIENT.get(t, t) in matching]
            if not fits:
                return None
            taken[i] = fits[0]
        return tuple(taken)

    def backward(
        self, outputs: Tensors, inputs: Tensors, cotangents: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        used = [i for i, value in enumerate(inputs) if value.requires_grad]
        if not cotangents or not used:
            return {}
        gradients = torch.autograd.grad(
            [outputs[i] for i in cotangents],
            [inputs[i] for i in used],
            list(cotangents.values()),
            allow_unused=True,
            materialize_grads=True,
            retain_graph=True,
        )
        return dict(zip(used, gradients, strict=True))

    def tracked(self, values: Tensors) -> Tensors:
        return tuple(
            value.detach().clone().requires_grad_(needed)
            for value, needed in zip(values, self.needs, strict=True)
        )

    def split_all(self, values: Tensors, types: Types) -> PerRank:
        parts = [self.split(value, t) for value, t in zip(values, types, strict=True)]
        return [tuple(part[rank] for part in parts) for rank in (0, 1)]

    def split(self, value: torch.Tensor, kind: AxisType) -> Sequence[torch.Tensor]:
        if kind.is_shard:
            return value.chunk(2, kind.dim)
        if kind is P:
            term = self.random_like(value)
            return [term, value - term]
        return [value, value]

    def random_like(self, value: torch.Tensor) -> torch.Tensor:
        return torch.randn(value.shape, dtype=value.dtype, generator=self.generator)


_GRADIENT = {R: P, P: R, I: R}
"""How the gradient of a type lies, in terms of values."""


def _matching(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[AxisType]:
    """As what the parts make the whole."""
    whole, first, second = whole.detach(), parts[0].detach(), parts[1].detach()
    if first.shape == whole.shape == second.shape:
        found = [R] if _close(first, whole) and _close(second, whole) else []
        summable = whole.is_floating_point() or whole.is_complex()
        return [*found, *([P] if summable and _close(first + second, whole) else [])]
    fits = first.dim() == whole.dim() and first.shape == second.shape
    for dim in range(whole.dim()) if fits else ():
        joined = torch.Size((*first.shape[:dim], 2 * first.shape[dim], *first.shape[dim + 1 :]))
        if joined == whole.shape and _close(torch.cat([first, second], dim), whole):
            return [S(dim)]
    return []


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.dtype is not expected.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    tolerance = 1e-4 if expected.dtype is torch.float32 else 1e-9
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
