"""Operators that draw random numbers: seeded by the seed, the step, the node and the rank's shard.

Ranks that have the same shard draw the same numbers, others draw different ones, and a step that
runs again draws the same ones. Uncompiled, the default generator is seeded for the time of one
operator. A compiler would trace the operator without the seeding, so there the numbers come from
an operator of our own, which it does not look into, and which reads the step when it runs.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from autoshard.errors import PlanError
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Step
from autoshard.torch_private import runs_backward, safe_softmax


def seeded(local: LocalNode, plain: LocalKernel) -> LocalKernel:
    """A kernel whose random numbers follow from the step, the node and the rank's shard.

    Args:
        local: the operator call.
        plain: its kernel, which draws from the default generator.
    """
    place = local.place
    # Only the axes that shard count, so that a mesh with further axes draws the same numbers.
    own = zip(local.outputs[0].types, place.axis_sizes, place.coordinate, strict=True)
    parts = [str(number) for axis_type, size, number in own if axis_type.is_shard and size > 1]
    identity = "/".join((local.node.name, *parts))
    generator = _default_generator(place.device)
    bind = _TRACED.get(local.node.operator)
    traced = bind(local, identity) if bind else None

    def run(tensors: Sequence[torch.Tensor], step: Step) -> tuple[torch.Tensor, ...]:
        if isinstance(step, torch.Tensor):  # a compiler traces
            if traced is None:
                raise PlanError(
                    f"node {local.node.name!r} calls {local.node.operator}, but a compiled planned "
                    f"model draws random numbers for dropout only: run it uncompiled, or pass the "
                    f"numbers as an argument of forward"
                )
            return traced(tensors, step)
        with _seeding(generator, place.seed, step, identity):
            return plain(tensors, step)

    return run


@contextmanager
def _seeding(generator: torch.Generator, seed: int, step: int, identity: str) -> Iterator[None]:
    """A context in which a generator draws the numbers of a node in a step."""
    # torch.manual_seed would seed every device, which takes longer than to draw.
    before = generator.get_state()
    generator.manual_seed(_derived_seed(f"{seed}/{step}/{identity}"))
    try:
        yield
    finally:
        generator.set_state(before)


def _default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on a device draw from."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    current = module.current_device()  # creates the generators
    found: torch.Generator = module.default_generators[current]
    return found


def _derived_seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


# A compiler must neither merge nor repeat calls, as of any operator that draws random numbers.
@torch.library.custom_op(
    "autoshard::dropout_factors", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_factors(
    step: torch.Tensor,
    size: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    probability: float,
    seed: int,
    identity: str,
) -> torch.Tensor:
    """Factors of dropout: 0, or 1 / (1 - probability).

    Args:
        step: index of the training step, on the CPU.
        size: of the tensor that is dropped out.
        dtype: of that tensor.
        device: of that tensor.
        probability: of a zero.
        seed: seed of all random numbers.
        identity: of the node and of the rank's shard.

    Raises:
        PlanError: it is called in a backward pass, where it would draw those of another step.
    """
    if runs_backward():
        raise PlanError(RECOMPUTED)
    ones = torch.ones(size, dtype=dtype, device=device)
    with _seeding(_default_generator(device), seed, int(step), identity):
        return torch.dropout(ones, probability, train=True)


@dropout_factors.register_fake
def _(
    _step: torch.Tensor,
    size: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    **_others: object,
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


RECOMPUTED = (
    "the planned model draws random numbers, so it cannot be recomputed in the backward pass: "
    "apply activation checkpointing inside the model, not around it"
)


_Factors = Callable[[torch.Tensor, Sequence[int], torch.Tensor], torch.Tensor]
"""Dropout's factors for a tensor of a given size, with the dtype of another one, and a step."""


def _factors(local: LocalNode, probability: float, identity: str) -> _Factors:
    seed = local.place.seed

    def draw(like: torch.Tensor, size: Sequence[int], step: torch.Tensor) -> torch.Tensor:
        drawn: torch.Tensor = dropout_factors(
            step,
            size,
            dtype=like.dtype,
            device=like.device,
            probability=probability,
            seed=seed,
            identity=identity,
        )
        return drawn

    return draw


_Traced = Callable[[Sequence[torch.Tensor], torch.Tensor], tuple[torch.Tensor, ...]]
"""A kernel for a step that is a tensor."""


def _bind_dropout(local: LocalNode, identity: str) -> _Traced:
    draw = _factors(local, local.number("p", _PROBABILITY), identity)
    trains = bool(local.node.argument("train", default=True))

    def run(tensors: Sequence[torch.Tensor], step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (values,) = tensors
        return (values * draw(values, values.shape, step) if trains else values.clone(),)

    return run


def _bind_attention(local: LocalNode, identity: str) -> _Traced:
    """Attention with dropout of its weights, as `scaled_dot_product_attention` documents it."""
    draw = _factors(local, local.number("dropout_p", 0.0), identity)
    default = local.input_shapes[0][-1] ** -0.5
    given = local.node.argument("scale")
    scale = default if given is None else local.number("scale", default)
    first = local.start(len(local.input_shapes[0]) - 2)
    num_queries = local.input_shapes[0][-2]
    is_causal = bool(local.node.argument("is_causal"))

    def run(tensors: Sequence[torch.Tensor], step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *masks = tensors
        if is_causal:
            # Later keys are masked for all queries.
            key, value = (x[..., : first + num_queries, :] for x in (key, value))
            seen = torch.ones(num_queries, key.shape[-2], dtype=torch.bool, device=key.device)
            masks = [seen.tril(first)]
        groups = query.shape[-3] // key.shape[-3] if query.ndim > _MATRIX else 1
        if groups > 1:
            key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * scale
        for mask in masks:
            is_flag = mask.dtype is torch.bool
            scores = scores.masked_fill(~mask, float("-inf")) if is_flag else scores + mask
        # Of a query that sees no key, the weights are zeros.
        weights = safe_softmax(scores, -1)
        return ((weights * draw(weights, weights.shape, step)) @ value,)

    return run


_MATRIX = 2
"""Number of dims of queries without heads."""

_PROBABILITY = 0.5
"""The default of the probability of dropout."""

_TRACED: Mapping[str, Callable[[LocalNode, str], _Traced]] = {
    "aten.dropout.default": _bind_dropout,
    "aten.scaled_dot_product_attention.default": _bind_attention,
}
