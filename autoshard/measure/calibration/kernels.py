"""Measuring kernels: launches, matrix products, copies and operators, forward and backward.

All ranks run them at the same time.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from autoshard.base.arrays import FloatArray
from autoshard.costs import Category, categorise, efficiency_key, operator_times
from autoshard.graph import Argument, DType, Node, Ref, Tensor
from autoshard.launching import synchronize
from autoshard.layouts import Layout
from autoshard.measure.calibration.measurements import (
    LARGE_SPREAD,
    CalibrationEffort,
    Timing,
    spread_of,
)
from autoshard.mesh import Device, OperatorFit, RooflineFit
from autoshard.mesh.calibration import CopySample, OperatorSample, ProductSample
from autoshard.ops import Call, Strategy, is_view, rule_for
from autoshard.runtime.program.kernels import bind_kernel
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Place

T = TypeVar("T")
Take = Callable[[str, Callable[[], Timing]], Timing]
"""Makes a measurement with a name."""

_MIN_RUNS = 3
"""Minimum number of runs, besides one to warm up."""

_PRODUCT_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16", "bfloat16")}
_PRODUCT_SHAPES = {
    "cpu": (
        *((n, n, n) for n in (128, 256, 512, 1024)),
        *((1024, 256, n) for n in (16, 32, 64, 256, 1024)),
        *((1024, n, 256) for n in (16, 64)),
        *((n, 256, 1024) for n in (16, 64, 256)),
    ),
    "cuda": (
        *((n, n, n) for n in (512, 1024, 2048, 4096, 8192)),
        *((8192, 4096, n) for n in (64, 256, 1024)),
        *((n, 4096, 4096) for n in (64, 256, 1024)),
    ),
}
"""Rows, inner dim and columns, by type of device."""

_COPY_BYTES = {"cpu": (1 << 20, 1 << 22, 1 << 24, 1 << 26), "cuda": (1 << 24, 1 << 26, 1 << 28)}
"""Bytes of copied tensors, by type of device."""

_ELEMENTS = {"cpu": (1 << 14, 1 << 16, 1 << 18, 1 << 20), "cuda": (1 << 18, 1 << 22, 1 << 25)}
"""Elements of an activation, by type of device."""

_WIDTH = 256
_HEAD = 32
_LENGTH = 128
_CLASSES = 64
"""Number of ids and labels."""

_COPIES = 3
"""Sets of tensors on which an operator runs in turn, so that caches are as in a program."""

_ONCE = RooflineFit(0.0, 1.0)

Shape = tuple[int, ...]


class KernelClock:
    """Measures functions that each rank runs by itself while the others do the same.

    On CPUs it measures CPU time, scaled by the number of ranks that share a CPU: wall time of
    a kernel shorter than a time slice of the system would not include the waiting of others.

    Args:
        device: of this rank.
        per_node: number of ranks that share the CPUs.
        effort: number and duration of the runs.
    """

    def __init__(self, device: torch.device, per_node: int, effort: CalibrationEffort) -> None:
        self._device = device
        self._effort = effort
        self._on_cpu = device.type == "cpu"
        # Seconds that pass while each rank of a node takes one second of CPU time.
        shared = max(per_node / (os.cpu_count() or 1), 1 / torch.get_num_threads())
        self._scale = shared if self._on_cpu else 1.0

    def seconds(self, run: Callable[[], T]) -> tuple[float, T]:
        """The duration of a function on this rank, and its result."""
        now = process_time if self._on_cpu else perf_counter
        synchronize(self._device)
        start = now()
        result = run()
        synchronize(self._device)
        return (now() - start) * self._scale, result

    def measure(self, run: Callable[[], object]) -> Timing:
        """The median of several runs, averaged over ranks, in seconds.

        If the runs of a rank differ much, it makes more.
        """
        run()
        effort, found = self._effort, list[float]()
        for _ in range(effort.num_repeats):
            start, runs = perf_counter(), 0
            while runs < effort.num_runs and (
                runs < _MIN_RUNS or perf_counter() - start < effort.seconds
            ):
                found.append(self.seconds(run)[0])
                runs += 1
            if spread_of(found) <= LARGE_SPREAD:
                break
        seconds, spread = self.over_ranks(np.array([median(found), spread_of(found)])).tolist()
        return Timing((seconds,), spread)

    def over_ranks(self, seconds: FloatArray) -> FloatArray:
        """The mean over ranks."""
        found = torch.from_numpy(seconds).to(self._device)
        dist.all_reduce(found)
        mean: FloatArray = (found / dist.get_world_size()).cpu().numpy()
        return mean


def measure_launch(device: torch.device, clock: KernelClock) -> Timing:
    """Seconds to launch a kernel: the duration of the smallest operator."""
    one = torch.ones(1, device=device)
    num_launches = 100

    def run() -> None:
        for _ in range(num_launches):
            torch.neg(one)

    timing = clock.measure(run)
    return replace(timing, seconds=(timing.seconds[0] / num_launches,))


def measure_products(
    device: torch.device, clock: KernelClock, take: Take
) -> Iterator[ProductSample]:
    """Measure matrix products: square ones, and shapes of a sharded model."""
    for name in _PRODUCT_DTYPES.get(device.type, ("float32",)):
        for extents in _PRODUCT_SHAPES.get(device.type, _PRODUCT_SHAPES["cpu"]):
            timing = take(
                f"product {name} {extents}", partial(_product, name, extents, device, clock)
            )
            yield ProductSample(name, extents, timing.seconds[0])


def _product(
    dtype: str, extents: tuple[int, int, int], device: torch.device, clock: KernelClock
) -> Timing:
    rows, terms, columns = extents
    kind = {"dtype": getattr(torch, dtype), "device": device}
    # Products of equal numbers need less power, so GPUs compute them at a higher clock.
    multiply = partial(torch.mm, torch.randn(rows, terms, **kind))
    return clock.measure(partial(multiply, torch.randn(terms, columns, **kind)))


def measure_copies(device: torch.device, clock: KernelClock, take: Take) -> Iterator[CopySample]:
    """Measure copies, which read as many bytes as they write."""
    for nbytes in _COPY_BYTES.get(device.type, _COPY_BYTES["cpu"]):
        timing = take(f"copy of {nbytes} bytes", partial(_copy, nbytes, device, clock))
        yield CopySample(2 * nbytes, timing.seconds[0])


def _copy(nbytes: int, device: torch.device, clock: KernelClock) -> Timing:
    tensor = torch.ones(nbytes // torch.float32.itemsize, device=device)
    return clock.measure(tensor.neg)


def num_kernels(device: torch.device) -> int:
    """Number of measurements of products, copies and launches."""
    dtypes = _PRODUCT_DTYPES.get(device.type, ("float32",))
    shapes = _PRODUCT_SHAPES.get(device.type, _PRODUCT_SHAPES["cpu"])
    return len(dtypes) * len(shapes) + len(_COPY_BYTES.get(device.type, _COPY_BYTES["cpu"])) + 1


def measure_operators(
    device: torch.device,
    roofline: Device,
    clock: KernelClock,
    effort: CalibrationEffort,
    take: Take,
) -> Iterator[OperatorSample]:
    """Measure each operator at each size, in rounds over all of them.

    In each round an operator finds the caches as the others left them; medians are taken.

    Args:
        device: of this rank.
        roofline: the device as fitted so far.
        clock: for the measurements.
        effort: sizes of activations, and number of rounds after one to warm up.
        take: makes a measurement with a name.
    """
    sizes = effort.elements or _ELEMENTS.get(device.type, _ELEMENTS["cpu"])
    cases = [_case(*call, device) for size in sizes for call in _calls(size)]

    def once() -> Timing:
        seconds = clock.over_ranks(np.array([_seconds(case, clock) for case in cases]))
        return Timing(tuple(seconds.flatten().tolist()))

    rounds = [take(f"round {i} of operators", once) for i in range(effort.num_rounds + 1)]
    found = np.median(np.array([timing.seconds for timing in rounds[1:]]), axis=0) / _COPIES
    found = found.reshape(-1, 2)
    for case, (forward, backward) in zip(cases, found.tolist(), strict=True):
        work, back = _roofline(case.call, roofline)
        views = is_view(case.call.operator)
        category = categorise(rule_for(case.call), case.call.inputs, is_view=views)
        yield OperatorSample(efficiency_key(case.call), category, (work, forward), (back, backward))


def _calls(elements: int) -> Iterator[tuple[str, dict[str, Any], tuple[Shape, ...]]]:
    """Operators of common models: name, arguments, and the shapes of the results."""
    rows = elements // _WIDTH
    batch = max(rows // _LENGTH, 1)
    length = rows // batch
    for operators in (_pointwise, _lookups, _products, _attention, _views):
        for operator, arguments, *shapes in operators(batch, length):
            # Without a shape, the result is like the first tensor.
            first = next(x for x in _tensors(arguments.values()))
            yield operator, arguments, tuple(shapes) or (first.shape,)


def _pointwise(batch: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Pointwise operators, reductions and norms."""
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


def _lookups(batch: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Operators with ids or labels."""
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
    """Fused attention, masked and causal, with and without dropout."""
    head = _float(batch, _WIDTH // _HEAD, length, _HEAD)
    qkv, mask = {"query": head, "key": head, "value": head}, _mask(batch, 1, length, length)
    for dropped in (0.0, 0.1):
        attention = "aten.scaled_dot_product_attention.default"
        yield attention, qkv | {"attn_mask": mask, "dropout_p": dropped}
        yield attention, qkv | {"dropout_p": dropped, "is_causal": True}


def _views(batch: int, length: int) -> Iterator[tuple[Any, ...]]:
    """Views and copies."""
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
    """A call of an operator with several sets of inputs.

    Attributes:
        call: of the operator.
        kernel: of the runtime.
        sets: inputs of each run.
        gradients: of the outputs of each run.
    """

    call: Call
    kernel: LocalKernel
    sets: tuple[tuple[torch.Tensor, ...], ...]
    gradients: tuple[tuple[torch.Tensor, ...], ...]

    def forward(self) -> list[tuple[torch.Tensor, ...]]:
        """Run on all sets."""
        return [self.kernel(tensors, 0) for tensors in self.sets]

    def backward(self, made: Sequence[Sequence[torch.Tensor]]) -> None:
        """The backward of all sets."""
        torch.autograd.grad(
            [out for outputs in made for out in outputs],
            [x for tensors in self.sets for x in tensors if x.requires_grad],
            [g for gradients in self.gradients for g in gradients],
        )


def _seconds(case: _Case, clock: KernelClock) -> tuple[float, float]:
    forward, made = clock.seconds(case.forward)
    backward, _ = clock.seconds(lambda: case.backward(made))
    return forward, backward


def _case(
    operator: str, arguments: Mapping[str, Any], made: tuple[Shape, ...], device: torch.device
) -> _Case:
    inputs = tuple(_tensors(arguments.values()))
    numbers = count()
    given = tuple((name, _with_references(value, numbers)) for name, value in arguments.items())
    node = Node("call", operator, given, tuple(f"made{i}" for i in range(len(made))))
    shapes, whole = tuple(x.shape for x in inputs), Layout(())
    layouts = (whole,) * len(inputs), (whole,) * len(made)
    kernel = bind_kernel(LocalNode(node, *layouts, shapes, shapes, made, Place((), (), device)))
    outputs = tuple(_float(*shape) for shape in made)
    return _Case(
        Call(operator, given, inputs, outputs),
        kernel,
        tuple(tuple(_synthetic(x, device) for x in inputs) for _ in range(_COPIES)),
        tuple(tuple(torch.rand(shape, device=device) for shape in made) for _ in range(_COPIES)),
    )


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for value in arguments:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _with_references(value: Any, numbers: Iterator[int]) -> Argument:
    """An argument with references instead of tensors."""
    if isinstance(value, Tensor):
        return Ref(f"given{next(numbers)}")
    if isinstance(value, tuple):
        return tuple(_with_references(item, numbers) for item in value)
    argument: Argument = value
    return argument


def _synthetic(tensor: Tensor, device: torch.device) -> torch.Tensor:
    if tensor.dtype is DType.BOOL:
        return torch.ones(tensor.shape, dtype=torch.bool, device=device)
    if not tensor.requires_grad:
        return torch.randint(0, _CLASSES, tensor.shape, device=device)
    return torch.rand(tensor.shape, device=device).add_(0.1).requires_grad_()


def _roofline(call: Call, device: Device) -> tuple[float, float]:
    """Seconds of a call by the roofline alone, forward and backward."""
    once = OperatorFit(_ONCE, _ONCE)
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
