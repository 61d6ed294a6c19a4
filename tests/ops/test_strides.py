"""Memory that tensors share, compared with PyTorch."""

from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.calls import MakeExample
from ops.test_image_rules import CASES as IMAGES
from ops.test_product_rules import CASES as PRODUCTS
from ops.test_product_rules import SDPA, SQUARE
from ops.test_shape_rules import CASES as SHAPES
from ops.test_shape_rules import VIEWS, real

from autoshard.graph import DType
from autoshard.ops import Call, Strides, made_strides, passes_gradient, view_strides
from autoshard.ops.rules.strides import normalised, reshaped_strides

FACTORS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def strides_of(tensor: torch.Tensor) -> Strides:
    return None if tensor.is_contiguous() else tensor.stride()


def same_strides(found: Strides, tensor: torch.Tensor) -> bool:
    """Strides of dims of size 1 mean nothing."""
    if found is None or tensor.is_contiguous():
        return found is None and tensor.is_contiguous()
    pairs = zip(found, tensor.stride(), tensor.shape, strict=True)
    return all(a == b for a, b, size in pairs if size != 1)


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def looks(call: Call, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> Any:
    return view_strides(
        call, tuple(source.shape), strides_of(source), [tuple(made.shape) for made in outputs]
    )


@pytest.mark.parametrize(
    ("operator", "arguments"), VIEWS, ids=[f"{i}-{c[0]}" for i, c in enumerate(VIEWS)]
)
def test_views_of_tensors_in_any_order(
    operator: str, arguments: dict[str, Any], example: MakeExample
) -> None:
    made = example(operator, **arguments)
    source = made.values[0]
    for order in permutations(range(source.dim())):
        moved = (
            source.permute(order)
            .contiguous()
            .permute([order.index(d) for d in range(source.dim())])
        )
        try:
            outputs = made.run((moved, *made.values[1:]))
        except RuntimeError:  # a view that these strides do not have; the runtime reshapes
            continue
        found = looks(made.call, outputs, moved)
        # Whether an empty tensor is shared makes no difference.
        if moved.numel():
            assert (found is not None) == shares_memory(outputs[0], moved)
        if found is not None:
            assert all(map(same_strides, found, outputs))


@given(FACTORS, st.data())
@settings(max_examples=300, derandomize=True, deadline=None)
def test_reshapes_copy_where_torch_copies(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    expanded = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    base = torch.empty([1 if once else size for size, once in zip(sizes, expanded, strict=True)])
    tensor = base.expand(sizes).permute(order)
    shape = list(tensor.shape)
    target: list[int] = []
    while shape:  # join and split dims at random
        size = shape.pop(0)
        while shape and data.draw(st.booleans()):
            size *= shape.pop(0)
        divisor = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        target.extend((divisor, size // divisor))
    made = tensor.reshape(target)
    found = reshaped_strides(tuple(tensor.shape), tensor.stride(), tuple(target))
    assert (found is not None) == shares_memory(made, tensor)
    if found is not None:
        assert same_strides(normalised(found, tuple(target)), made)


@pytest.mark.parametrize(
    ("operator", "order"),
    [
        *product(("aten.gelu.default", "aten.clone.default"), permutations(range(4))),
        # the kernel takes heads whose elements lie next to each other
        *((SDPA, (*order, 3)) for order in permutations(range(3))),
    ],
)
def test_what_follows_the_order_of_its_input(
    operator: str, order: tuple[int, ...], example: MakeExample
) -> None:
    inverse = [order.index(dim) for dim in range(4)]
    source = real(2, 4, 8, 6).permute(order).contiguous().permute(inverse)
    names = ("query", "key", "value") if operator == SDPA else ("self",)
    arguments = dict.fromkeys(names, source)
    made = example(operator, **arguments)
    (output,) = made.run(made.values)
    shapes = [tuple(value.shape) for value in made.values]
    strides = [strides_of(value) for value in made.values]
    assert view_strides(made.call, shapes[0], strides[0], [shapes[0]]) is None
    assert same_strides(made_strides(made.call, shapes, strides, shapes[0]), output)


def test_attention_on_cuda_follows_its_queries_too(example: MakeExample) -> None:
    query = torch.empty(2, 8, 4, 16, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    key = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.bfloat16)
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, key)[0]
    made = example(SDPA, **SQUARE)
    shape = tuple(query.shape)
    assert same_strides(made_strides(made.call, [shape], [query.stride()], shape), output)


@pytest.mark.parametrize(
    ("operator", "arguments", "alias"),
    [
        ("aten.to.dtype", {"self": real(4), "dtype": torch.float64}, True),
        ("aten.to.dtype", {"self": real(4), "dtype": torch.float64, "copy": True}, False),
        ("aten.to.dtype", {"self": real(4), "dtype": torch.float32}, False),
        ("aten.type_as.default", {"self": real(4), "other": real(3)}, True),
        ("aten.contiguous.default", {"self": real(4, 6)}, True),
        ("aten.contiguous.default", {"self": real(4, 6).t()}, False),
        ("aten.dropout.default", {"input": real(4), "p": 0.0, "train": True}, True),
        ("aten.dropout.default", {"input": real(4), "p": 0.5, "train": False}, True),
        ("aten.dropout.default", {"input": real(4), "p": 0.5, "train": True}, False),
        ("aten.neg.default", {"self": real(4)}, False),
    ],
)
def test_what_returns_its_input(
    operator: str, arguments: dict[str, Any], alias: bool, example: MakeExample
) -> None:
    made = example(operator, **arguments)
    outputs = made.run(made.values)
    assert shares_memory(outputs[0], made.values[0]) == alias
    assert (looks(made.call, outputs, made.values[0]) is not None) == alias


CONSTANT = {"weight", "pos_weight", "running_mean", "running_var"}
"""Floating-point arguments that have no derivative, of losses and of batch norms."""
OTHERWISE = {
    SDPA,
    "aten.type_as.default",
    "aten.index_put.default",  # passes it on where it accumulates
}
GRADIENTS = [case for case in [*PRODUCTS, *SHAPES, *IMAGES] if case[0] not in OTHERWISE]


@pytest.mark.parametrize(
    ("operator", "arguments"), GRADIENTS, ids=[f"{i}-{c[0]}" for i, c in enumerate(GRADIENTS)]
)
def test_gradients_that_are_passed_on(
    operator: str, arguments: dict[str, Any], example: MakeExample
) -> None:
    made = example(operator, **arguments)
    loss_or_norm = "loss" in operator or "entropy" in operator or "batch_norm" in operator
    for i, (name, value) in enumerate(zip(made.call.names, made.values, strict=True)):
        if not value.is_floating_point() or value.numel() < 2:
            continue
        if (loss_or_norm and name in CONSTANT) or made.call.outputs[0].dtype is DType.COMPLEX128:
            continue
        values = [v.detach().clone() for v in made.values]
        values[i].requires_grad_()
        outputs = made.run(tuple(values))
        if len(outputs) > 1 or not outputs[0].requires_grad or outputs[0] is values[i]:
            continue
        cotangent = torch.randn_like(outputs[0])
        (gradient,) = torch.autograd.grad(outputs[0], values[i], cotangent)
        assert passes_gradient(made.call, i) == shares_memory(gradient, cotangent)
