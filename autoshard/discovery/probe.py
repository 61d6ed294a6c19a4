"""Probes: small versions of operator calls, on which shardings can be tried."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from autoshard.discovery.shapes import (
    FEW_ELEMENTS,
    GROWTH,
    MAX_ELEMENTS,
    MAX_VALIDATION_ELEMENTS,
    SMALL_SIZE,
    VALIDATION_GROWTH,
    Shapes,
    integers_in,
    num_elements,
    replace_integers,
    smaller_sizes,
    with_sizes,
)
from autoshard.discovery.trial import PerRank, Tensors, Trial, Types, close
from autoshard.discovery.values import FLOATS, INTEGERS, RandomInputKind, draw
from autoshard.graph import Node
from autoshard.ops import Call
from autoshard.runtime.program.operators import OperatorCall


class NotTriableError(Exception):
    """An operator cannot be tried on small tensors; the message has the reason."""


class RandomOperatorError(NotTriableError):
    """An operator draws random numbers, so its outputs would differ between ranks."""


@dataclass(frozen=True)
class Probe:
    """A small version of a call.

    Attributes:
        call: the original call.
        node: the small call, with its attributes.
        shapes: shapes of the small inputs.
        floating: element type of floating-point inputs; None for that of the original inputs.
        device: device on which the call runs.
        differentiable: True if gradients are compared.
        integers: kinds of integer inputs that the operator accepts (see `values.RandomInputKind`).
        follow: True if attributes that equal a size of the inputs are made small too.
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
        """Run the operator on the given tensors, global or local."""
        custom = frozenset({self.node.operator})
        return OperatorCall(self.node, torch.device(self.device), custom=custom)(values)

    def trial(self, kind: RandomInputKind) -> Trial:
        """Return a trial with inputs of a kind.

        Raises:
            Exception: any error that the operator raises.
        """
        needs = [self.differentiable and t.dtype.is_differentiable for t in self.call.inputs]
        return Trial(self.draw(kind), needs, self.run, self.run_ranks)

    def run_ranks(self, _: Types, ranks: PerRank) -> Iterator[PerRank]:
        """Yield the outputs of every rank, or nothing if the operator fails on a rank."""
        try:
            yield [self.run(values) for values in ranks]
        except Exception:  # noqa: BLE001  custom operators may raise anything
            return

    def draw(self, kind: RandomInputKind, *, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Draw inputs of a kind."""
        return draw(
            kind,
            self.call.inputs,
            self.shapes,
            floating=self.floating,
            device=torch.device(self.device),
            seed=seed,
        )

    @property
    def kinds(self) -> tuple[RandomInputKind, ...]:
        """Kinds of inputs to try."""
        first = self.integers[0]
        more = (RandomInputKind("normal", other) for other in self.integers[1:])
        return (*(RandomInputKind(floats, first) for floats in FLOATS), *more)

    def larger(
        self, sizes: Collection[int], *, times: int = GROWTH, limit: int = MAX_ELEMENTS
    ) -> "Probe | None":
        """Return a probe in which some sizes are larger; None if it is too large or does not run.

        Args:
            sizes: sizes of the original call to enlarge.
            times: minimum factor by which they grow, relative to the smallest probe.
            limit: maximum number of elements of all inputs together.
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

    def for_validation(self, sizes: Collection[int]) -> "Probe | None":
        """Return a probe in which some sizes are much larger; None if none such runs.

        Args:
            sizes: sizes of the original call to enlarge.
        """
        larger = (
            self.larger(sizes, times=times, limit=MAX_VALIDATION_ELEMENTS)
            for times in VALIDATION_GROWTH
        )
        return next((probe for probe in larger if probe is not None), None)


def probe_of(call: Call) -> Probe:
    """Return a probe of a call that runs.

    Raises:
        NotTriableError: no small version runs, or the operator has side effects.
    """
    if not call.inputs:
        raise NotTriableError("it has no tensor inputs")
    reason = f"even its smallest valid inputs have more than {MAX_ELEMENTS} elements"
    for attempt in _attempts(call):
        try:
            return _prepared(attempt)
        except NotTriableError:
            raise
        except Exception as error:  # noqa: BLE001  an operator may raise anything
            line = (str(error).splitlines() or [type(error).__name__])[0][:_MAX_MESSAGE]
            reason = f"it fails on small tensors: {line}"
    raise NotTriableError(reason)


def _small(
    call: Call, *, follow: bool, larger: Collection[int] = (), times: int = GROWTH
) -> Probe | None:
    """The call with small sizes; with `follow`, attributes that equal sizes are replaced too."""
    shapes = [tensor.shape for tensor in call.inputs]
    attributes = [i for _, value in call.arguments for i in integers_in(value)]
    sizes = {size for shape in shapes for size in shape if size > SMALL_SIZE}
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
    """Small calls to try: with gradients first, then without; float64 before the original dtype.

    Attributes that equal sizes are kept if the tensors are small then. The CPU comes before a GPU.
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
    """Return the probe with the kinds of integers that the operator accepts.

    Raises:
        NotTriableError: the operator has side effects or random outputs.
        Exception: the operator fails on all kinds of inputs, or has no gradient.
    """
    integral = any(not t.dtype.is_differentiable and t.dtype != "bool" for t in probe.call.inputs)
    taken: list[str] = []
    refusal: Exception | None = None
    for integers in INTEGERS if integral else INTEGERS[:1]:
        try:
            _check(probe, RandomInputKind(FLOATS[0], integers))
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
    if ready.differentiable and not trial.with_gradient and _carries_gradient(probe.call):
        raise RuntimeError("it has no gradient")
    return ready


def _carries_gradient(call: Call) -> bool:
    """True if the element types allow gradients from outputs to inputs."""
    return all(
        any(tensor.dtype.is_differentiable for tensor in tensors)
        for tensors in (call.inputs, call.outputs)
    )


def _check(probe: Probe, kind: RandomInputKind) -> None:
    """Run the operator twice and check that it is a deterministic function of its inputs.

    Raises:
        NotTriableError: it modifies or aliases its inputs, or its outputs are too large or have
            shapes that depend on values.
        RandomOperatorError: two runs differ.
    """
    values = probe.draw(kind)
    _check_size(probe, values)
    before = [value.clone() for value in values]
    devices = [] if probe.device == "cpu" else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(1)
        first = probe.run(values)
        torch.manual_seed(2)
        second = probe.run(values)
        other = probe.run(probe.draw(kind, seed=1))
    if not all(map(close, values, before)):
        raise NotTriableError("it modifies its inputs in place")
    taken = {value.untyped_storage().data_ptr() for value in values if value.numel()}
    if any(o.untyped_storage().data_ptr() in taken for o in first if o.numel()):
        raise NotTriableError("its outputs share memory with its inputs")
    if num_elements([o.shape for o in first]) > MAX_ELEMENTS:
        raise NotTriableError(f"its outputs have more than {MAX_ELEMENTS} elements")
    shapes, again, others = ([o.shape for o in made] for made in (first, second, other))
    if shapes != others or [len(s) for s in shapes] != [len(o.shape) for o in probe.call.outputs]:
        raise NotTriableError("the shapes of its outputs depend on the values of its inputs")
    if shapes != again or not all(map(close, first, second)):
        raise RandomOperatorError("it draws random numbers")


def _check_size(probe: Probe, values: Tensors) -> None:
    """Refuse an ATen operator with large outputs before it runs: programs are untrusted.

    Raises:
        NotTriableError: the outputs are large, or only known after it has run.
    """
    if not probe.node.operator.startswith("aten."):
        return
    abstract = OperatorCall(probe.node, torch.device("meta"))
    try:
        made = abstract([value.to("meta") for value in values])
    except NotImplementedError as error:
        raise NotTriableError(
            "the shapes of its outputs depend on the values of its inputs, or are known only "
            "after it has run"
        ) from error
    if num_elements([o.shape for o in made]) > MAX_ELEMENTS:
        raise NotTriableError(f"its outputs have more than {MAX_ELEMENTS} elements")


_MAX_MESSAGE = 200
"""Maximum length of an error message of an operator, in characters."""
