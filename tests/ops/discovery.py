"""What one axis of two ranks may do to an operator, found by trying.

Inputs get every combination of types, and `autoshard.discovery.trial` tries them
with the kernels that the runtime has for operators with a rule. What holds for these numbers
must hold for the same numbers in another order too.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import torch
from ops.calls import Example
from ops.simulation import CONSTANTS

from autoshard.discovery.trial import Option, PerRank, Tensors, Trial, Types, axis_types
from autoshard.graph import Node
from autoshard.layouts import AxisType, I, Layout, P, R
from autoshard.ops import Kernel, OperatorRule, axis_rules, rule_for, spec_for
from autoshard.runtime.program.kernels import bind_kernel
from autoshard.runtime.program.local_node import LocalNode, Place

COMBINATIONS = 300
"""Combinations of input types that are tried for one example; of more, a sample."""

LOOKS_AT_OUTPUT = {
    *(Kernel.RESIZE, Kernel.RESHAPE, Kernel.REPEAT),
    *(Kernel.SCALED, Kernel.CLASSES),
}
"""Kernels that depend on the layout of the output."""

NOT_POSSIBLE = (RuntimeError, IndexError, ValueError, AssertionError)
"""What an operator says to local tensors that do not fit."""


def _canonical(trial: Trial, inputs: Types, outputs: Types) -> Option:
    """The option with R instead of I wherever no gradient flows."""
    flows = {i for i, gradient in trial.gradients.items() if bool(gradient.any())}
    return Option(
        tuple(t if t is not I or i in flows else R for i, t in enumerate(inputs)),
        tuple(t if t is not I or i in trial.with_gradient else R for i, t in enumerate(outputs)),
    )


def missing_options(example: Example, rule: OperatorRule | None = None) -> set[Option]:
    """What holds though the operator's rule, or the rule given, does not offer it."""
    trial = trial_of(example)
    rules = list(axis_rules(rule or rule_for(example.call), 2))
    offered = {_canonical(trial, rule.inputs, rule.outputs) for rule in rules}
    again = trial_of(_shuffled(example))
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
    choices = [[R, P] if unchecked else axis_types(value) for value in example.values]
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


def trial_of(example: Example) -> Trial:
    """The example, run on ranks as the runtime does."""
    call = example.call
    needs = [
        tensor.dtype.is_differentiable and (call.operator, name) not in CONSTANTS
        for name, tensor in zip(call.names, call.inputs, strict=True)
    ]
    return Trial(example.values, needs, example.run, partial(_run_ranks, example))


def _run_ranks(example: Example, inputs: Types, ranks: PerRank) -> Iterator[PerRank]:
    """What both ranks make, for each layout of the output that the kernel may look at."""
    whole = example.call.outputs[0]
    looks = spec_for(example.call.operator).kernel in LOOKS_AT_OUTPUT
    for first in axis_types(torch.empty(whole.shape)) if looks else [R]:
        try:
            yield [_run_rank(example, rank, inputs, first, ranks[rank]) for rank in (0, 1)]
        except NOT_POSSIBLE:
            continue


def _run_rank(
    example: Example, rank: int, inputs: Types, output: AxisType, values: Tensors
) -> Tensors:
    call = example.call
    made = tuple(f"out{i}" for i in range(len(call.outputs)))
    layout = Layout((output,))
    local = LocalNode(
        node=Node("node", call.operator, call.arguments, made),
        inputs=tuple(Layout((axis_type,)) for axis_type in inputs),
        outputs=(layout,) * len(made),
        shapes=tuple(tensor.shape for tensor in call.inputs),
        input_shapes=tuple(tuple(value.shape) for value in values),
        output_shapes=(
            layout.local_shape(call.outputs[0].shape, (2,)),
            *(tensor.shape for tensor in call.outputs[1:]),
        ),
        place=Place((2,), (rank,), torch.device("cpu")),
    )
    return bind_kernel(local)(values, 0)
