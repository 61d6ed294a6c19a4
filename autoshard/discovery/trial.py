"""One call with fixed numbers, run whole and in parts: what an axis may do to it.

The ranks of one axis are simulated in this process. Inputs are cut or split as the types of
an option say, every rank runs the operator, and what they make is compared with the whole,
forward and backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from autoshard.layouts import AxisType, I, P, R, S

Types = tuple[AxisType, ...]
Tensors = Sequence[torch.Tensor]
PerRank = Sequence[Tensors]

RunWhole = Callable[[Tensors], Tensors]
"""Runs the whole call."""

RunRanks = Callable[[Types, PerRank], Iterator[PerRank]]
"""What all ranks make, given the types and the values of their inputs. It may come in several
ways, where what a rank runs depends on more than its inputs; it does not come at all where the
operator refuses."""


@dataclass(frozen=True)
class Option:
    """What an axis does: types of inputs and outputs, R where no gradient flows."""

    inputs: Types
    outputs: Types

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


class Trial:
    """A call with fixed numbers.

    Args:
        values: the inputs.
        needs: which of them get a gradient.
        run: runs the call.
        run_ranks: runs a rank's share of it on every rank.
        parts: how many ranks the axis has.

    Raises:
        RuntimeError: the call refuses these numbers, or has no gradient (torch's own words).

    Attributes:
        outputs: of the whole call.
        made: positions of the outputs that have a gradient.
        gradients: of the inputs that get one, by position.
    """

    def __init__(
        self,
        values: Tensors,
        needs: Sequence[bool],
        run: RunWhole,
        run_ranks: RunRanks,
        *,
        parts: int = 2,
    ) -> None:
        self._values = values
        self._needs = needs
        self._run_ranks = run_ranks
        self._parts = parts
        self._generator = torch.Generator().manual_seed(5)
        inputs = self._tracked(values)
        self.outputs = run(inputs)
        self.made = [i for i, output in enumerate(self.outputs) if output.requires_grad]
        self._cotangents = {i: self._random_like(self.outputs[i]) for i in self.made}
        self.gradients = self._backward(self.outputs, inputs, self._cotangents)

    def options(self, inputs: Types) -> set[Option]:
        """What holds with these types of inputs."""
        ranks = [self._tracked(values) for values in self._split_all(self._values, inputs)]
        found: set[Option] = set()
        for run in self._run_ranks(inputs, ranks):
            choices = [
                _matching(whole, [outputs[i] for outputs in run])
                for i, whole in enumerate(self.outputs)
            ]
            for outputs in product(*map(self._with_gradient, range(len(choices)), choices)):
                taken = self._inputs_after_backward(inputs, outputs, ranks, run)
                if taken is not None:
                    found.add(Option(taken, outputs))
        return found

    def canonical(self, option: Option) -> Option:
        """R in place of I where no gradient flows."""
        inputs = (t if t is not I or self._flows(i) else R for i, t in enumerate(option.inputs))
        outputs = (t if t is not I or i in self.made else R for i, t in enumerate(option.outputs))
        return Option(tuple(inputs), tuple(outputs))

    def _flows(self, position: int) -> bool:
        return position in self.gradients and bool(self.gradients[position].any())

    def _with_gradient(self, output: int, kinds: list[AxisType]) -> list[AxisType]:
        return [I, *kinds] if R in kinds and output in self.made else kinds

    def _inputs_after_backward(
        self, inputs: Types, outputs: Types, ranks: PerRank, run: PerRank
    ) -> Types | None:
        """The types of inputs that their gradients have; None if one has none of them."""
        if any(made[i].requires_grad is False for made in run for i in self.made):
            return None
        parts = {
            i: self._split(self._cotangents[i], _GRADIENT.get(outputs[i], outputs[i]))
            for i in self.made
        }
        local = [
            self._backward(made, values, {i: part[rank] for i, part in parts.items()})
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

    def _split_all(self, values: Tensors, types: Types) -> PerRank:
        parts = [self._split(value, t) for value, t in zip(values, types, strict=True)]
        return [tuple(part[rank] for part in parts) for rank in range(self._parts)]

    def _split(self, value: torch.Tensor, kind: AxisType) -> Sequence[torch.Tensor]:
        if kind.is_shard:
            return value.chunk(self._parts, kind.dim)
        if kind is P:
            terms = [self._random_like(value) for _ in range(self._parts - 1)]
            return [*terms, value - sum(terms)]
        return [value] * self._parts

    def _random_like(self, value: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(value.shape, dtype=value.dtype, generator=self._generator)
        return drawn.to(value.device)


_GRADIENT = {R: P, P: R, I: R}
"""How the gradient of a type lies, in terms of values."""


def axis_types(value: torch.Tensor, parts: int = 2) -> list[AxisType]:
    """What an axis may do to a value; R stands for the same on all ranks."""
    cuts = [S(dim) for dim, size in enumerate(value.shape) if size and size % parts == 0]
    return [R, *cuts, *([P] if value.is_floating_point() or value.is_complex() else [])]


def _matching(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[AxisType]:
    """As what the parts make the whole."""
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
    return []


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


_TOLERANCES = {torch.float64: 2e-6, torch.complex128: 2e-6, torch.float32: 1e-4}
"""Relative, and of the largest element. What is true only nearly is off by far more; what is
true may be computed in float32 inside of an operator that takes float64."""

_COARSE = 2e-2
"""For element types of half precision and less."""


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors agree, up to rounding where they are floating-point numbers."""
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
