"""A trial: one call with fixed inputs, run on global tensors and on simulated ranks.

The ranks of one mesh axis are simulated in this process. Inputs are sharded or made partial as the
types of an option require, every rank runs the operator, and outputs and gradients are compared
with those of the global call.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from autoshard.layouts import AxisType, I, P, R, S

Types = tuple[AxisType, ...]
Tensors = Sequence[torch.Tensor]
PerRank = Sequence[Tensors]

RunWhole = Callable[[Tensors], Tensors]
"""Run the call on global tensors."""

RunRanks = Callable[[Types, PerRank], Iterator[PerRank]]
"""Run the call on all ranks, given the types and local values of their inputs, and yield the
outputs of every rank. Yields several results if the local call depends on more than its inputs, and
none if the operator raises an error."""


@dataclass(frozen=True)
class Option:
    """Types of inputs and outputs on one mesh axis; R instead of I if no gradient flows."""

    inputs: Types
    outputs: Types

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


class Trial:
    """A call with fixed inputs.

    Args:
        values: the global inputs.
        needs: for each input, True if it gets a gradient.
        run: runs the global call.
        run_ranks: runs the local calls of all ranks.

    Raises:
        RuntimeError: the call rejects these inputs, or has no gradient (message of torch).

    Attributes:
        values: the global inputs.
        outputs: outputs of the global call.
        with_gradient: positions of the outputs that have a gradient.
        gradients: gradients of the inputs that get one, by position.
    """

    def __init__(
        self,
        values: Tensors,
        needs: Sequence[bool],
        run: RunWhole,
        run_ranks: RunRanks,
    ) -> None:
        self.values = values
        self._needs = needs
        self._run_ranks = run_ranks
        self._generator = torch.Generator().manual_seed(5)
        inputs = self._tracked(values)
        self.outputs = run(inputs)
        self.with_gradient = [i for i, output in enumerate(self.outputs) if output.requires_grad]
        self._cotangents = {i: self._random_like(self.outputs[i]) for i in self.with_gradient}
        self.gradients = self._backward(self.outputs, inputs, self._cotangents)

    def options(
        self, inputs: Types, parts: int = 2, interleaved: Collection[AxisType] = ()
    ) -> set[Option]:
        """Return all valid options with these input types on an axis of `parts` ranks.

        Args:
            inputs: type of each input.
            parts: number of ranks.
            interleaved: interleaved types that outputs may have.
        """
        ranks = [self._tracked(values) for values in self._split_all(self.values, inputs, parts)]
        found: set[Option] = set()
        for run in self._run_ranks(inputs, ranks):
            choices = [
                _matching(whole, [outputs[i] for outputs in run], interleaved)
                for i, whole in enumerate(self.outputs)
            ]
            for outputs in product(*map(self._with_invariant, range(len(choices)), choices)):
                taken = self._inputs_after_backward(inputs, outputs, ranks, run)
                if taken is not None:
                    found.add(Option(taken, outputs))
        return found

    def valid_options(
        self, inputs: Types, parts: int, interleaved: Collection[AxisType] = ()
    ) -> set[Option]:
        """Return the `options`; none if the operator or its backward fails."""
        try:
            return self.options(inputs, parts, interleaved)
        except Exception:  # noqa: BLE001  backward of an operator may raise anything
            return set()

    def _with_invariant(self, output: int, kinds: list[AxisType]) -> list[AxisType]:
        return [I, *kinds] if R in kinds and output in self.with_gradient else kinds

    def _inputs_after_backward(
        self, inputs: Types, outputs: Types, ranks: PerRank, run: PerRank
    ) -> Types | None:
        """Input types after checking gradients; None if a gradient matches no type of its input."""
        if any(made[i].requires_grad is False for made in run for i in self.with_gradient):
            return None
        shares = {
            i: self._split(self._cotangents[i], _GRADIENT.get(outputs[i], outputs[i]), len(ranks))
            for i in self.with_gradient
        }
        local = [
            self._backward(made, values, {i: share[rank] for i, share in shares.items()})
            for rank, (made, values) in enumerate(zip(run, ranks, strict=True))
        ]
        taken = list(inputs)
        for i, whole in self.gradients.items():
            matching = _matching(whole, [gradients[i] for gradients in local], {inputs[i]})
            candidates = (R, I) if inputs[i] is R else (inputs[i],)
            fits = [t for t in candidates if _GRADIENT.get(t, t) in matching]
            if not fits:
                return None
            taken[i] = fits[0]
        return tuple(taken)

    def _backward(
        self, outputs: Tensors, inputs: Tensors, cotangents: Mapping[int, torch.Tensor]
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

    def _tracked(self, values: Tensors) -> Tensors:
        return tuple(
            value.detach().clone().requires_grad_(needed)
            for value, needed in zip(values, self._needs, strict=True)
        )

    def _split_all(self, values: Tensors, types: Types, parts: int) -> PerRank:
        shares = [self._split(value, t, parts) for value, t in zip(values, types, strict=True)]
        return [tuple(share[rank] for share in shares) for rank in range(parts)]

    def _split(self, value: torch.Tensor, kind: AxisType, parts: int) -> Sequence[torch.Tensor]:
        if kind.is_shard:
            return _shards(value, kind, parts)
        if kind is P:
            terms = [self._random_like(value) for _ in range(parts - 1)]
            return [*terms, value - sum(terms)]
        return [value] * parts

    def _random_like(self, value: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(value.shape, dtype=value.dtype, generator=self._generator)
        return drawn.to(value.device)


_GRADIENT = {R: P, P: R, I: R}
"""Type of the gradient, read as the type of a value."""


def axis_types(value: torch.Tensor, parts: int = 2) -> list[AxisType]:
    """Return the types of a value on an axis of `parts` ranks; R stands for both I and R."""
    shards = [S(dim) for dim, size in enumerate(value.shape) if size and size % parts == 0]
    return [R, *shards, *([P] if value.is_floating_point() or value.is_complex() else [])]


def _shards(value: torch.Tensor, kind: AxisType, parts: int) -> Sequence[torch.Tensor]:
    """The shard of each rank; of interleaved shards, one of each section."""
    total = sum(kind.sub_shards or (1,))
    sizes = [size * value.shape[kind.dim] // total for size in kind.sub_shards or (1,)]
    sections = [section.chunk(parts, kind.dim) for section in torch.split(value, sizes, kind.dim)]
    return [torch.cat(shards, kind.dim) for shards in zip(*sections, strict=True)]


def _is_interleaved(whole: torch.Tensor, parts: Sequence[torch.Tensor], kind: AxisType) -> bool:
    """True if the values of the ranks are interleaved shards of the global value."""
    if not kind.sub_shards or whole.shape[kind.dim] % (len(parts) * sum(kind.sub_shards)):
        return False
    return all(map(close, parts, _shards(whole, kind, len(parts))))


def _matching(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], interleaved: Collection[AxisType] = ()
) -> list[AxisType]:
    """Types for which the values of the ranks represent the global value."""
    whole, parts = whole.detach(), [part.detach() for part in parts]
    first = parts[0]
    if any(part.shape != first.shape for part in parts):
        return []
    if first.shape == whole.shape:
        found = [R] if all(close(part, whole) for part in parts) else []
        summable = whole.is_floating_point() or whole.is_complex()
        return [*found, *([P] if summable and close(_sum(parts), whole) else [])]
    for dim in range(whole.dim()) if first.dim() == whole.dim() else ():
        joined = (*first.shape[:dim], len(parts) * first.shape[dim], *first.shape[dim + 1 :])
        if joined == whole.shape and close(torch.cat(list(parts), dim), whole):
            return [S(dim)]
    return [kind for kind in interleaved if _is_interleaved(whole, parts, kind)]


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


_TOLERANCES = {torch.float64: 2e-6, torch.complex128: 2e-6, torch.float32: 1e-4}
"""Tolerance relative to the largest element. Wrong options differ by far more; correct ones may be
computed in float32 inside an operator that takes float64."""

_COARSE = 2e-2
"""Tolerance for half precision and below."""


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if two tensors are equal, up to rounding if they are floating-point."""
    if actual.dtype is not expected.dtype or actual.shape != expected.shape:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    tolerance = _TOLERANCES.get(expected.dtype, _COARSE)
    finite = expected.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(finite.max()) if expected.numel() else 0.0
    return torch.allclose(
        actual, expected, rtol=tolerance, atol=tolerance * max(largest, 1e-3), equal_nan=True
    )
