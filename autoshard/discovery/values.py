"""Random inputs to try an operator with.

An option must be valid for several kinds of inputs. Floating-point inputs are normally distributed
(two magnitudes) or positive; booleans are true half of the time, rarely or mostly; integers are
arbitrary, sorted or small, since their meaning (ids, positions, offsets) is unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.discovery.shapes import Shapes
from autoshard.graph import Tensor


@dataclass(frozen=True, slots=True)
class RandomInputKind:
    """Kind of random inputs.

    Attributes:
        floats: `normal`, `large` or `positive`.
        integers: `any`, `ordered` or `small`.
    """

    floats: str
    integers: str


FLOATS = ("normal", "positive", "large")
INTEGERS = ("any", "ordered", "small")


def draw(
    kind: RandomInputKind,
    tensors: Sequence[Tensor],
    shapes: Shapes,
    *,
    floating: torch.dtype | None,
    device: torch.device,
    seed: int,
) -> tuple[torch.Tensor, ...]:
    """Draw the inputs of a call.

    Args:
        kind: kind of inputs.
        tensors: the original inputs, for their element types.
        shapes: shapes of the inputs.
        floating: element type that replaces all floating-point ones; None to keep them.
        device: device of the inputs.
        seed: random seed.
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
            made.append(torch.rand(shape, generator=generator) < _TRUE_FRACTION[kind.floats])
        else:
            made.append(_INTEGERS[kind.integers](shape, end, generator).to(own))
    return tuple(value.to(device) for value in made)


def _floating(
    kind: RandomInputKind, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator
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


_TRUE_FRACTION = {"normal": 0.5, "positive": 0.9, "large": 0.1}
"""Fraction of booleans that are true, by the kind of floating-point inputs."""

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
