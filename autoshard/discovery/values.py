"""Numbers to try an operator with.

A claim must hold for all of several kinds of numbers: normally distributed ones of two
magnitudes and positive ones; flags are set half of the time, hardly ever or nearly always; and
integers may be anything, in order, or all small, since what they stand for (ids, positions,
offsets) is not known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.discovery.shapes import Shapes
from autoshard.graph import Tensor


@dataclass(frozen=True, slots=True)
class Kind:
    """Which numbers to draw.

    Attributes:
        floats: `normal`, `large` or `positive`.
        integers: `any`, `ordered` or `small`.
    """

    floats: str
    integers: str


FLOATS = ("normal", "positive", "large")
INTEGERS = ("any", "ordered", "small")


def draw(
    kind: Kind,
    tensors: Sequence[Tensor],
    shapes: Shapes,
    *,
    floating: torch.dtype | None,
    device: torch.device,
    seed: int,
) -> tuple[torch.Tensor, ...]:
    """Inputs of a call.

    Args:
        kind: of numbers.
        tensors: element types of the inputs.
        shapes: of the inputs.
        floating: element type in place of every floating-point one; as it is if None.
        device: where they are made.
        seed: of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [size for shape in shapes for size in shape if size > 1]
    end = min(sizes, default=2)
    made: list[torch.Tensor] = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        own: torch.dtype = getattr(torch, tensor.dtype.value)
        if tensor.dtype.is_differentiable:
            numbers = _floating(kind, own, shape, generator)
            made.append(numbers.to(floating if floating and own.is_floating_point else own))
        elif own is torch.bool:
            made.append(torch.rand(shape, generator=generator) < _SET[kind.floats])
        else:
            made.append(_INTEGERS[kind.integers](shape, end, generator).to(own))
    return tuple(value.to(device) for value in made)


def _floating(
    kind: Kind, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    numbers = _FLOATS[kind.floats](shape, generator)
    if dtype.is_complex:
        return torch.complex(numbers, _FLOATS[kind.floats](shape, generator))
    return numbers


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _positive(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1


def _large(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return 20 * _normal(shape, generator)


def _any(shape: tuple[int, ...], end: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, end, shape, generator=generator)


def _ordered(shape: tuple[int, ...], end: int, generator: torch.Generator) -> torch.Tensor:
    return _any(shape, end, generator).flatten().sort().values.view(shape)


def _small(shape: tuple[int, ...], _end: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator)


_SET = {"normal": 0.5, "positive": 0.9, "large": 0.1}
"""Share of flags that are set, by the kind of floating-point numbers that go with them."""

_FLOATS: Mapping[str, Callable[[tuple[int, ...], torch.Generator], torch.Tensor]] = {
    "normal": _normal,
    "positive": _positive,
    "large": _large,
}

_INTEGERS: Mapping[str, Callable[[tuple[int, ...], int, torch.Generator], torch.Tensor]] = {
    "any": _any,
    "ordered": _ordered,
    "small": _small,
}
