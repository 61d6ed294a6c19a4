"""Saved tensors of the specs, compared with those of autograd."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from ops.calls import ELEMENTWISE, MakeExample, example_cases
from ops.test_image_rules import CASES as IMAGES
from ops.test_product_rules import CASES as PRODUCTS
from ops.test_product_rules import SDPA, SQUARE, mask
from ops.test_shape_rules import CASES as SHAPES
from ops.test_shape_rules import X, real

from autoshard.ops import backward_workspace, saved_tensors
from autoshard.ops.registry import FAMILIES
from autoshard.ops.rules.spec import saves_everything

Arguments = dict[str, Any]
Run = Callable[[tuple[torch.Tensor, ...]], Sequence[Any]]

CONSTANTS = {
    ("aten.batch_norm.default", "running_mean"),
    ("aten.batch_norm.default", "running_var"),
    ("aten.cross_entropy_loss.default", "weight"),
    ("aten.nll_loss_nd.default", "weight"),
    ("aten.binary_cross_entropy_with_logits.default", "weight"),
    ("aten.binary_cross_entropy_with_logits.default", "pos_weight"),
    # the fused kernels of the CPU have no gradient for it
    ("aten.scaled_dot_product_attention.default", "attn_mask"),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attn_mask"),
}
"""Floating-point arguments that have no derivative."""
SINGLE = 16
"""Bytes of single elements, which the table leaves out: factors, sums of weights."""

OTHERWISE_ON_CPU = {
    *("aten.rms_norm.default", "aten.lstm.input", "aten.gru.input"),
    "aten.log_sigmoid.default",
}
"""Fused on CUDA but made of parts here, and a buffer that only the CPU fills."""
UPPER_ESTIMATE = {"aten.einsum.default", "aten.ldexp.Tensor"}
"""A product of three, multiplied pair by pair, and a product with a power of two."""

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
MASKS = [mask(2, 1, 8, 8), real(2, 4, 8, 8)]
MORE: list[tuple[str, Arguments]] = [
    ("aten.native_dropout.default", {"input": X, "p": 0.5, "train": True}),
    (FLASH, SQUARE),
    (FLASH, SQUARE | {"attn_mask": MASKS[1]}),
    *((SDPA, SQUARE | {"attn_mask": given}) for given in MASKS),
    ("aten.clamp.Tensor", {"self": X, "min": real(8), "max": real(8) + 1}),
    ("aten.kl_div.default", {"self": real(4, 6), "target": real(4, 6), "log_target": True}),
    ("aten.logcumsumexp.default", {"self": X, "dim": 1}),
    ("aten.cummax.default", {"self": X, "dim": 1}),
    ("aten.max_pool1d.default", {"self": X, "kernel_size": [2]}),
    ("aten.adaptive_avg_pool2d.default", {"self": real(2, 3, 6, 6), "output_size": [2, 2]}),
]


def pointwise_cases() -> Iterator[tuple[str, Arguments]]:
    """Every operator that acts element by element, on numbers between 0.2 and 1."""
    value = torch.linspace(0.2, 0.8, 24, dtype=torch.float64).reshape(4, 6)
    numbers = {"number": 0.7, "float": 0.3, "int": 1}
    for packet in ELEMENTWISE:
        overloads = getattr(torch.ops.aten, packet)
        for name in overloads.overloads():
            schema = getattr(overloads, name)._schema
            arguments: Arguments = {}
            for argument in schema.arguments:
                kind = str(argument.type)
                if kind == "Tensor":
                    arguments[argument.name] = value + 0.01 * len(arguments)
                elif kind in numbers and not argument.has_default_value():
                    arguments[argument.name] = numbers[kind]
            made = [str(result.type) for result in schema.returns]
            tensors = any(isinstance(value, torch.Tensor) for value in arguments.values())
            if tensors and made == ["Tensor"] and not schema.is_mutable and packet not in INTEGERS:
                yield f"aten.{packet}.{name}", arguments


INTEGERS = {
    *("__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "bitwise_and", "bitwise_or"),
    *("bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift"),
    *("clamp", "clip"),  # needs a bound
}


def is_fused(operator: str, arguments: Arguments) -> bool:
    """Whether the CPU has a fused kernel for a call, as CUDA has."""
    if operator in OTHERWISE_ON_CPU:
        return False
    if operator != SDPA:
        return True
    query, value = arguments["query"].shape, arguments["value"].shape
    return len(query) == 4 and query[-1] == value[-1]


CASES = [
    case
    for case in [*PRODUCTS, *SHAPES, *IMAGES, *MORE, *pointwise_cases(), *example_cases()]
    if is_fused(case[0], case[1])
]


@dataclass
class Kept:
    """What autograd keeps of one call."""

    inputs: set[int]
    outputs: set[int]
    extras: list[int]
    """Bytes of each other tensor."""


def kept_by(run: Run, tensors: Sequence[torch.Tensor], gradients: Sequence[bool]) -> Kept | None:
    """Run a call and see; None if nothing that it makes has a gradient."""
    values = tuple(
        value.detach().clone().requires_grad_(needed)
        for value, needed in zip(tensors, gradients, strict=True)
    )
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [made for made in run(values) if isinstance(made, torch.Tensor)]
    if not any(output.requires_grad for output in outputs):
        return None
    made = {storage(tensor): i for i, tensor in reversed([*enumerate(outputs)])}
    given = {storage(tensor): i for i, tensor in enumerate(values)}
    kept = [storage(tensor) for tensor in seen]
    others = {storage(t): t.untyped_storage().nbytes() for t in seen}
    return Kept(
        inputs={given[key] for key in kept if key in given},
        outputs={made[key] for key in kept if key in made and key not in given},
        extras=[size for key, size in others.items() if key not in given and key not in made],
    )


def storage(tensor: torch.Tensor) -> int:
    """What tells the memory of a tensor from that of all others that are alive."""
    address: int = tensor.untyped_storage()._cdata
    return address


def choices(example: Any) -> Iterator[list[bool]]:
    """Every choice of inputs that need a gradient."""
    call = example.call
    able = [
        i
        for i, (name, tensor) in enumerate(zip(call.names, call.inputs, strict=True))
        if tensor.dtype.is_differentiable and (call.operator, name) not in CONSTANTS
    ]
    for count in range(1, len(able) + 1):
        for chosen in combinations(able, count):
            yield [i in chosen for i in range(len(call.inputs))]


@pytest.mark.parametrize(
    ("operator", "arguments"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_table_says_what_is_kept(operator: str, arguments: Arguments, example: MakeExample) -> None:
    made = example(operator, **arguments)
    for gradients in choices(made):
        really = kept_by(made.run, made.values, gradients)
        if really is None:
            continue
        saved = saved_tensors(made.call, gradients)
        assert really.inputs <= saved.inputs
        assert really.outputs <= saved.outputs
        if operator in UPPER_ESTIMATE:
            continue
        assert really.outputs == saved.outputs
        for copied in saved.inputs - really.inputs:
            really.extras.remove(made.values[copied].nbytes)
        shapes = [tensor.shape for tensor in (*made.call.inputs, *made.call.outputs)]
        extras = sum(extra.nbytes(shapes) for extra in saved.extras)
        assert abs(sum(really.extras) - extras) <= SINGLE


@pytest.mark.parametrize(
    "kernel",
    [
        lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
        lambda q, k, v: torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, True
        ),
    ],
    ids=["flash", "efficient"],
)
def test_attention_keeps_what_the_kernels_of_cuda_keep(
    kernel: Callable[..., Sequence[Any]], example: MakeExample
) -> None:
    heads = [torch.empty(2, 4, 32, 16, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    really = kept_by(lambda tensors: kernel(*tensors), heads, [True] * 3)
    assert really is not None
    whole = example(SDPA, **dict(zip(("query", "key", "value"), heads, strict=True)))
    saved = saved_tensors(whole.call, [True] * 3)
    assert really.inputs == saved.inputs
    assert {0, 1} <= really.outputs  # the second holds a number per query
    made = [tensor for tensor in kernel(*heads) if isinstance(tensor, torch.Tensor)]
    assert all(made[i].numel() <= 2 for i in really.outputs - {0, 1})  # of the random numbers
    assert saved.outputs == {0}
    (extra,) = saved.extras
    assert extra.nbytes([head.shape for head in heads]) == made[1].nbytes


def test_dropout_keeps_the_mask_of_its_fused_kernel(example: MakeExample) -> None:
    made = example("aten.dropout.default", input=X, p=0.5, train=True)
    (extra,) = saved_tensors(made.call, [True]).extras
    fused = example("aten.native_dropout.default", input=X, p=0.5, train=True)
    really = kept_by(fused.run, fused.values, [True])
    assert really is not None
    assert really.outputs == {1}
    assert extra.nbytes([X.shape]) == fused.run((X,))[1].nbytes
    whole = example("aten.dropout.default", input=X, p=0.0, train=True)
    assert saved_tensors(whole.call, [True]).extras == ()


def test_fused_norm_of_squares_keeps_its_input_and_a_number_per_row(example: MakeExample) -> None:
    made = example("aten.rms_norm.default", input=X, normalized_shape=[8], weight=real(8))
    saved = saved_tensors(made.call, [True, True])
    (extra,) = saved.extras
    assert saved.inputs == {0, 1}
    assert extra.nbytes([X.shape]) == 4 * 6 * 8  # a double each


def test_a_factor_is_kept_for_the_other_alone(example: MakeExample) -> None:
    made = example("aten.linear.default", input=X, weight=real(12, 8), bias=real(12))
    assert saved_tensors(made.call, [True, False, False]).inputs == {1}
    assert saved_tensors(made.call, [False, True, True]).inputs == {0}
    assert saved_tensors(made.call, [False, False, True]).inputs == set()
    assert saved_tensors(made.call, [False] * 3).inputs == set()


def test_unknown_operators_keep_everything(example: MakeExample) -> None:
    made = example("aten.cdist.default", x1=real(4, 2), x2=real(6, 2))
    saved = saved_tensors(made.call, [True, False])
    assert saved.inputs == {0, 1}
    assert saved.outputs == {0}


def test_only_random_operators_are_taken_to_save_everything() -> None:
    """A spec has to say what it saves; that of the others is an upper estimate."""
    specs = [spec for family in FAMILIES for spec in family.SPECS]
    assert all(spec.draws == "" for spec in specs if spec.saves is saves_everything)


def test_backward_of_a_loss_works_on_two_gradients_of_its_scores(example: MakeExample) -> None:
    scores, target = real(12, 5), torch.zeros(12, dtype=torch.int64)
    made = example("aten.cross_entropy_loss.default", self=scores, target=target, reduction=2)
    (working,) = backward_workspace(made.call, [True, False])
    assert working.nbytes([scores.shape, target.shape]) == scores.nbytes
    assert backward_workspace(example("aten.relu.default", self=scores).call, [True]) == ()
