"""Operators as the runtime runs them, forward and backward, over sizes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch

from autoshard.costs import Category, categorise, operator_times, pace_name
from autoshard.graph import Argument, DType, Node, Ref, Tensor
from autoshard.layouts import Layout
from autoshard.mesh import Device, Pace, Paces
from autoshard.mesh.calibration import OperatorSample
from autoshard.ops import Call, Strategy, is_view, rule_for
from autoshard.runtime.calibration.stopwatch import KernelClock
from autoshard.runtime.kernels import bind_kernel
from autoshard.runtime.local_node import LocalKernel, LocalNode, Place

_ELEMENTS = {"cpu": (1 << 14, 1 << 16, 1 << 18, 1 << 20), "cuda": (1 << 18, 1 << 22, 1 << 25)}
"""Of an activation, by type of device."""

_WIDTH = 256
_HEAD = 32
_LENGTH = 128
_CLASSES = 64
"""Ids and labels are below that."""

_COPIES = 3
"""Sets of tensors on which an operator runs in turn, so that caches are as in a program."""

_ONCE = Pace(0.0, 1.0)

Shape = tuple[int, ...]


def _calls(elements: int) -> Iterator[tuple[str, dict[str, Any], tuple[Shape, ...]]]:
    """Operators of common models, their arguments, tensors by shape, and the shapes made."""
    for operator, arguments, *made in _asked(elements):
        first = next(x for x in _tensors(arguments.values()))
        yield operator, arguments, tuple(made) or (first.shape,)


def _asked(elements: int) -> Iterator[tuple[Any, ...]]:
    """Likewise; where no shapes are said, the result is like the first tensor."""
    rows = elements // _WIDTH
    batch = max(rows // _LENGTH, 1)
    length = rows // batch
    yield from _streams(batch, length)
    yield from _tables(batch, length)
    yield from _products(batch, length)
    yield from _attention(batch, length)
    yield from _views(batch, length)


def _streams(batch: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Operators that go over an activation."""
    x, row, column = _float(batch, length, _WIDTH), _float(_WIDTH), (batch, length, 1)
    for name in ("neg", "rsqrt", "exp", "tanh", "sigmoid", "relu", "silu", "gelu"):
        yield f"aten.{name}.default", {"self": x}
    for name in ("add", "sub", "mul", "div"):
        yield f"aten.{name}.Tensor", {"self": x, "other": x}
    yield "aten.pow.Tensor_Scalar", {"self": x, "exponent": 2}
    yield "aten.mean.dim", {"self": x, "dim": (-1,), "keepdim": True}, column
    yield "aten.sum.dim_IntList", {"self": x, "dim": (-1,), "keepdim": True}, column
    yield "aten.softmax.int", {"self": x, "dim": -1}
    yield "aten.layer_norm.default", _norm(x, row) | {"bias": row}
    yield "aten.rms_norm.default", _norm(x, row)
    yield "aten.dropout.default", {"input": x, "p": 0.1, "train": True}
    yield "aten.cat.default", {"tensors": (x, x), "dim": -1}, (batch, length, 2 * _WIDTH)
    yield "aten.clone.default", {"self": x}


def _tables(batch: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Operators that look up ids or labels."""
    rows, made = batch * length, (batch, length, _WIDTH)
    flat = _float(rows, _WIDTH)
    yield "aten.embedding.default", {"weight": flat, "indices": _ids(batch, length)}, made
    yield "aten.cross_entropy_loss.default", {"self": flat, "target": _ids(rows)}, ()


def _products(batch: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Matrix products and convolutions."""
    rows, heads = batch * length, _WIDTH // _HEAD
    x, row = _float(batch, length, _WIDTH), _float(_WIDTH)
    flat, square = _float(rows, _WIDTH), _float(_WIDTH, _WIDTH)
    yield "aten.addmm.default", {"self": row, "mat1": flat, "mat2": square}, flat.shape
    yield "aten.linear.default", {"input": x, "weight": square}
    yield "aten.mm.default", {"self": flat, "mat2": square}
    head, keys = _float(batch, heads, length, _HEAD), _float(batch, heads, _HEAD, length)
    yield "aten.matmul.default", {"self": head, "other": keys}, (batch, heads, length, length)
    products, factor = _float(heads, rows, _HEAD), _float(heads, _HEAD, _HEAD)
    yield "aten.bmm.default", {"self": products, "mat2": factor}
    image, kernel = _float(batch, 16, length, _WIDTH // 16), _float(16, 16, 3, 3)
    yield "aten.conv2d.default", {"input": image, "weight": kernel, "padding": (1, 1)}


def _attention(batch: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Fused attention, masked and causal, with dropout and without."""
    head = _float(batch, _WIDTH // _HEAD, length, _HEAD)
    qkv, mask = {"query": head, "key": head, "value": head}, _mask(batch, 1, length, length)
    for dropped in (0.0, 0.1):
        attention = "aten.scaled_dot_product_attention.default"
        yield attention, qkv | {"attn_mask": mask, "dropout_p": dropped}
        yield attention, qkv | {"dropout_p": dropped, "is_causal": True}


def _views(batch: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Operators that only look at memory in another way."""
    x, column = _float(batch, length, _WIDTH), _float(batch, length, 1)
    heads, flat = _WIDTH // _HEAD, (batch * length, _WIDTH)
    head, turned = _float(batch, heads, length, _HEAD), (batch, length, heads, _HEAD)
    half = (batch, length, _WIDTH // 2)
    yield "aten.expand.default", {"self": column, "size": x.shape}, x.shape
    yield "aten.reshape.default", {"self": x, "shape": flat}, flat
    yield "aten.transpose.int", {"self": head, "dim0": 1, "dim1": 2}, turned
    yield "aten.permute.default", {"self": head, "dims": (0, 2, 1, 3)}, turned
    yield "aten.unsqueeze.default", {"self": x, "dim": 1}, (batch, 1, length, _WIDTH)
    yield "aten.slice.Tensor", {"self": x, "dim": -1, "start": 0, "end": _WIDTH // 2}, half
    yield "aten.split.Tensor", {"self": x, "split_size": _WIDTH // 2, "dim": -1}, half, half


def _norm(x: Tensor, row: Tensor) -> dict[str, Any]:
    return {"input": x, "normalized_shape": (_WIDTH,), "weight": row}


def _float(*shape: int) -> Tensor:
    return Tensor(shape, DType.FLOAT32, requires_grad=True)


def _mask(*shape: int) -> Tensor:
    return Tensor(shape, DType.BOOL, requires_grad=False)


def _ids(*shape: int) -> Tensor:
    return Tensor(shape, DType.INT64, requires_grad=False)


@dataclass(frozen=True)
class _Case:
    """A call, what runs for it, and what it takes and makes.

    Attributes:
        call: for its rule.
        kernel: as the runtime runs it.
        sets: tensors that it takes, several times.
        gradients: of what it makes from each set.
    """

    call: Call
    kernel: LocalKernel
    sets: tuple[tuple[torch.Tensor, ...], ...]
    gradients: tuple[tuple[torch.Tensor, ...], ...]

    def forward(self) -> list[tuple[torch.Tensor, ...]]:
        """Run on every set."""
        return [self.kernel(tensors, 0) for tensors in self.sets]

    def backward(self, made: Sequence[Sequence[torch.Tensor]]) -> None:
        """Gradients of every set at once."""
        torch.autograd.grad(
            [out for outputs in made for out in outputs],
            [x for tensors in self.sets for x in tensors if x.requires_grad],
            [g for gradients in self.gradients for g in gradients],
        )


def measure_operators(
    device: torch.device,
    roofline: Device,
    clock: KernelClock,
    *,
    elements: Sequence[int] | None = None,
    num_rounds: int = 7,
) -> Iterator[OperatorSample]:
    """Each operator at each size, all ranks at the same time.

    All of them run in turn, round after round, so that each finds the caches as others left
    them; medians count.

    Args:
        device: what a rank runs on.
        roofline: the device as it is known so far.
        clock: measures.
        elements: of an activation, several; by default what the device is used for.
        num_rounds: that are measured, after one to warm up.
    """
    sizes = elements or _ELEMENTS.get(device.type, _ELEMENTS["cpu"])
    cases = [_case(*call, device) for size in sizes for call in _calls(size)]
    rounds = [[_seconds(case, clock) for case in cases] for _ in range(num_rounds + 1)]
    found = clock.over_ranks(np.median(np.array(rounds[1:]), axis=0)) / _COPIES
    for case, (forward, backward) in zip(cases, found.tolist(), strict=True):
        work, back = _roofline(case.call, roofline)
        views = is_view(case.call.operator)
        category = categorise(rule_for(case.call), case.call.inputs, is_view=views)
        yield OperatorSample(pace_name(case.call), category, (work, forward), (back, backward))


def _seconds(case: _Case, clock: KernelClock) -> tuple[float, float]:
    forward, made = clock.seconds(case.forward)
    backward, _ = clock.seconds(lambda: case.backward(made))
    return forward, backward


def _case(
    operator: str, arguments: Mapping[str, Any], made: tuple[Shape, ...], device: torch.device
) -> _Case:
    inputs = tuple(_tensors(arguments.values()))
    numbers = count()
    given = tuple((name, _referring(value, numbers)) for name, value in arguments.items())
    node = Node("call", operator, given, tuple(f"made{i}" for i in range(len(made))))
    shapes, whole = tuple(x.shape for x in inputs), Layout(())
    layouts = (whole,) * len(inputs), (whole,) * len(made)
    kernel = bind_kernel(LocalNode(node, *layouts, shapes, shapes, made, Place((), (), device)))
    outputs = tuple(_float(*shape) for shape in made)
    return _Case(
        Call(operator, given, inputs, outputs),
        kernel,
        tuple(tuple(_made_up(x, device) for x in inputs) for _ in range(_COPIES)),
        tuple(tuple(torch.rand(shape, device=device) for shape in made) for _ in range(_COPIES)),
    )


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for value in arguments:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _referring(value: Any, numbers: Iterator[int]) -> Argument:
    """An argument with references in place of tensors."""
    if isinstance(value, Tensor):
        return Ref(f"given{next(numbers)}")
    if isinstance(value, tuple):
        return tuple(_referring(item, numbers) for item in value)
    argument: Argument = value
    return argument


def _made_up(tensor: Tensor, device: torch.device) -> torch.Tensor:
    if tensor.dtype is DType.BOOL:
        return torch.ones(tensor.shape, dtype=torch.bool, device=device)
    if not tensor.requires_grad:
        return torch.randint(0, _CLASSES, tensor.shape, device=device)
    return torch.rand(tensor.shape, device=device).add_(0.1).requires_grad_()


def _roofline(call: Call, device: Device) -> tuple[float, float]:
    """Seconds that a call takes by the roofline alone, forward and backward."""
    once = Paces(_ONCE, _ONCE)
    bare = replace(device, operators=dict.fromkeys(Category, once))
    rule = rule_for(call)
    forward, both = (
        float(
            operator_times(
                rule,
                [Strategy((), (), rule.sizes)],
                call.inputs,
                call.outputs,
                bare,
                training=training,
                is_view=is_view(call.operator),
            )[0]
        )
        for training in (False, True)
    )
    return forward, both - forward
