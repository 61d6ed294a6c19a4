"""A call made small enough to be tried, and its trials."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from autoshard.discovery.shapes import (
    FEW_ELEMENTS,
    KEPT,
    MAX_ELEMENTS,
    TIMES,
    Shapes,
    integers_in,
    num_elements,
    replace_integers,
    smaller_sizes,
    with_sizes,
)
from autoshard.discovery.trial import PerRank, Tensors, Trial, Types, close
from autoshard.discovery.values import FLOATS, INTEGERS, Kind, draw
from autoshard.graph import Node
from autoshard.ops import Call
from autoshard.runtime.operators import OperatorCall


class NotTriableError(Exception):
    """An operator cannot be tried; the message says why."""


class RandomOperatorError(NotTriableError):
    """An operator draws random numbers, so not even whole values are the same on all ranks."""


@dataclass(frozen=True)
class Probe:
    """A small call, and how to run it.

    Attributes:
        call: the call, large.
        node: the small call, with its attributes.
        shapes: of the small inputs.
        floating: element type of floating-point inputs; their own if None.
        device: where it runs.
        differentiable: whether gradients are compared.
        integers: kinds of integers that the operator takes.
        follow: whether attributes that are sizes became small too.
    """

    call: Call
    node: Node
    shapes: Shapes
    floating: torch.dtype | None = None
    device: str = "cpu"
    differentiable: bool = True
    integers: tuple[str, ...] = ("any",)
    follow: bool = False

    def run(self, values: Tensors) -> tuple[torch.Tensor, ...]:
        """Run on whole tensors, or on a rank's."""
        custom = frozenset({self.node.operator})
        return OperatorCall(self.node, torch.device(self.device), custom=custom)(values)

    def trial(self, kind: Kind, *, parts: int = 2) -> Trial:
        """A trial with such numbers.

        Raises:
            Exception: whatever the operator raises on them.
        """
        needs = [self.differentiable and t.dtype.is_differentiable for t in self.call.inputs]
        return Trial(self.draw(kind), needs, self.run, self.run_ranks, parts=parts)

    def run_ranks(self, _: Types, ranks: PerRank) -> Iterator[PerRank]:
        """What every rank makes, unless one refuses."""
        try:
            yield [self.run(values) for values in ranks]
        except Exception:  # noqa: BLE001  an operator may be anybody's and raise anything
            return

    def draw(self, kind: Kind, *, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Inputs of this kind."""
        return draw(
            kind,
            self.call.inputs,
            self.shapes,
            floating=self.floating,
            device=torch.device(self.device),
            seed=seed,
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of numbers to try."""
        first = self.integers[0]
        more = (Kind("normal", other) for other in self.integers[1:])
        return (*(Kind(floats, first) for floats in FLOATS), *more)

    def larger(
        self, sizes: Collection[int], *, times: int = TIMES, limit: int = MAX_ELEMENTS
    ) -> "Probe | None":
        """The same with some sizes of the large call less small, if that runs too.

        Args:
            sizes: of the large call.
            times: how many times as large as they are here they become at least.
            limit: elements that the inputs may have together.
        """
        small = _small(self.call, follow=self.follow, larger=sizes, times=times)
        if small is None or small.shapes == self.shapes or num_elements(small.shapes) > limit:
            return None
        other = replace(self, node=small.node, shapes=small.shapes)
        try:
            other.trial(other.kinds[0])
        except Exception:  # noqa: BLE001  an operator may raise anything
            return None
        return other


def probe_of(call: Call) -> Probe:
    """A small form of a call that runs.

    Raises:
        NotTriableError: there is none, or running it is not all that the operator does.
    """
    if not call.inputs:
        raise NotTriableError("it takes no tensors")
    reason = f"its tensors have more than {MAX_ELEMENTS} elements at any size that fits"
    for attempt in _attempts(call):
        try:
            return _prepared(attempt)
        except NotTriableError:
            raise
        except Exception as error:  # noqa: BLE001  an operator may raise anything
            line = (str(error).splitlines() or [type(error).__name__])[0][:_LONGEST]
            reason = f"no small call of it runs: {line}"
    raise NotTriableError(reason)


def _small(
    call: Call, *, follow: bool, larger: Collection[int] = (), times: int = TIMES
) -> Probe | None:
    """The call with small sizes; attributes that are sizes follow them, or bound them."""
    shapes = [tensor.shape for tensor in call.inputs]
    attributes = [i for _, value in call.arguments for i in integers_in(value)]
    sizes = {size for shape in shapes for size in shape if size > KEPT}
    if follow and sizes.isdisjoint(attributes):
        return None
    bounds = [value for value in attributes if not (follow and value in sizes)]
    chosen = smaller_sizes(shapes, bounds, larger=larger, times=times)
    small = with_sizes(shapes, chosen)
    if num_elements(small) > MAX_ELEMENTS:
        return None
    replaced = {size: chosen[size] for size in sizes} if follow else {}
    arguments = tuple((name, replace_integers(v, replaced)) for name, v in call.arguments)
    outputs = tuple(f"out{i}" for i in range(len(call.outputs)))
    return Probe(call, Node("call", call.operator, arguments, outputs), small, follow=follow)


def _attempts(call: Call) -> Iterator[Probe]:
    """Small calls: with gradients before without, and in precise numbers before the call's own.

    Attributes that are sizes stay if the tensors are small then, and the CPU goes before a GPU.
    """
    own = {t.dtype for t in call.inputs if t.dtype.is_differentiable}
    real = own and not any(dtype.startswith("complex") for dtype in own)
    precise = (torch.float64, torch.float32, None) if real else (None,)
    names = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    made = (_small(call, follow=follow) for follow in (False, True))
    small = sorted(
        (probe for probe in made if probe is not None),
        key=lambda probe: num_elements(probe.shapes) > FEW_ELEMENTS,
    )
    ways = product((True, False) if own else (True,), small, names, precise)
    for differentiable, probe, name, floating in ways:
        yield replace(probe, floating=floating, device=name, differentiable=differentiable)


def _prepared(probe: Probe) -> Probe:
    """The probe with the kinds of integers that it takes.

    Raises:
        NotTriableError: the operator does more than to compute outputs from its inputs.
        Exception: whatever it raises on all numbers, or where it has no gradient.
    """
    integral = any(not t.dtype.is_differentiable and t.dtype != "bool" for t in probe.call.inputs)
    taken: list[str] = []
    refusal: Exception | None = None
    for integers in INTEGERS if integral else INTEGERS[:1]:
        try:
            _check(probe, Kind(FLOATS[0], integers))
        except NotTriableError:
            raise
        except Exception as error:  # noqa: BLE001  as above
            refusal = error
        else:
            taken.append(integers)
    if not set(taken) & {"any", "ordered"}:
        assert refusal is not None
        raise refusal
    ready = replace(probe, integers=tuple(taken))
    trial = ready.trial(ready.kinds[0])
    if ready.differentiable and not trial.made and _carries_gradient(probe.call):
        raise RuntimeError("it has no gradient")
    return ready


def _carries_gradient(call: Call) -> bool:
    """Whether gradients could pass through a call, by its element types."""
    return all(
        any(tensor.dtype.is_differentiable for tensor in tensors)
        for tensors in (call.inputs, call.outputs)
    )


def _check(probe: Probe, kind: Kind) -> None:
    """Run twice, and compare."""
    values = probe.draw(kind)
    before = [value.clone() for value in values]
    devices = [] if probe.device == "cpu" else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(1)
        first = probe.run(values)
        torch.manual_seed(2)
        second = probe.run(values)
        other = probe.run(probe.draw(kind, seed=1))
    if not all(map(close, values, before)):
        raise NotTriableError("it writes into its inputs")
    taken = {value.untyped_storage().data_ptr() for value in values if value.numel()}
    if any(o.untyped_storage().data_ptr() in taken for o in first if o.numel()):
        raise NotTriableError("its outputs share memory with its inputs")
    if num_elements([o.shape for o in first]) > MAX_ELEMENTS:
        raise NotTriableError(f"its outputs have more than {MAX_ELEMENTS} elements")
    shapes, again, others = ([o.shape for o in made] for made in (first, second, other))
    if shapes != others or [len(s) for s in shapes] != [len(o.shape) for o in probe.call.outputs]:
        raise NotTriableError("the shapes of its outputs depend on the numbers in its inputs")
    if shapes != again or not all(map(close, first, second)):
        raise RandomOperatorError("it draws random numbers")


_LONGEST = 200
"""Characters of what an operator said."""
