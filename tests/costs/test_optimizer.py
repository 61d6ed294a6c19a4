from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Planner, mlp
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.costs import Optimizer, OptimizerSpec, optimizer_time
from autoshard.errors import OptionError
from autoshard.graph import DType
from autoshard.mesh import Device

DEVICE = Device("toy", {"float32": 1e9}, memory_bandwidth=1000.0, memory=10**9, launch_overhead=7.0)

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

TORCH: dict[Optimizer, Make] = {
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.SGD_MOMENTUM: lambda p: torch.optim.SGD(p, momentum=0.9),
    Optimizer.ADAM: torch.optim.Adam,
    Optimizer.ADAMW: torch.optim.AdamW,
    Optimizer.ADAFACTOR: torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("shape", [(5, 7), (6,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_what_torch_keeps(name: Optimizer, shape: tuple[int, ...], dtype: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
    optimizer = TORCH[name]([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    kept = sum(
        value.nbytes
        for key, value in state.items()
        if key != "step" and isinstance(value, torch.Tensor)
    )
    assert OptimizerSpec(name).state_nbytes(shape, DType(dtype)) == kept


def test_master_weights_are_float32_and_so_is_their_state() -> None:
    spec = OptimizerSpec(Optimizer.ADAMW, master_weights=True)
    assert spec.master_nbytes((10, 10), DType.BFLOAT16) == 400
    assert spec.state_nbytes((10, 10), DType.BFLOAT16) == 800
    assert spec.master_nbytes((10, 10), DType.FLOAT32) == 0
    assert spec.state_nbytes((10, 10), DType.FLOAT32) == 800


def test_state_may_have_its_own_dtype() -> None:
    spec = OptimizerSpec(Optimizer.ADAM, state_dtype=DType.BFLOAT16, master_weights=True)
    assert spec.state_nbytes((10, 10), DType.FLOAT32) == 400
    assert spec.state_nbytes((10, 10), DType.BFLOAT16) == 400
    assert spec.master_nbytes((10, 10), DType.BFLOAT16) == 400


def test_without_an_optimizer_there_are_no_master_weights() -> None:
    spec = OptimizerSpec(Optimizer.NONE, master_weights=True)
    assert spec.master_nbytes((10,), DType.BFLOAT16) == 0
    assert optimizer_time(spec, (10,), DType.BFLOAT16, DEVICE) == 0.0


@pytest.mark.parametrize(
    ("spec", "dtype", "bytes_per_element"),
    [
        # Read p and g, write p.
        (OptimizerSpec(Optimizer.SGD), DType.FLOAT32, 12),
        (OptimizerSpec(Optimizer.SGD_MOMENTUM), DType.FLOAT32, 20),
        # Read p, g, m and v, write p, m and v.
        (OptimizerSpec(Optimizer.ADAM), DType.FLOAT32, 28),
        (OptimizerSpec(Optimizer.ADAMW), DType.BFLOAT16, 14),
        (OptimizerSpec(Optimizer.ADAMW, state_dtype=DType.FLOAT32), DType.BFLOAT16, 6 + 16),
        # Read the copy, g, m and v, write p, the copy, m and v.
        (OptimizerSpec(Optimizer.ADAMW, master_weights=True), DType.BFLOAT16, 4 + 8 + 16),
        # Foreach: 4 passes over p, 2 over g, 3 over m, 5 over v and 6 over temporaries like v.
        (OptimizerSpec(Optimizer.ADAMW, foreach=True), DType.FLOAT32, 80),
        (
            OptimizerSpec(Optimizer.ADAMW, master_weights=True, foreach=True),
            DType.BFLOAT16,
            4 * 4 + 2 + 2 * 2 + 14 * 4,
        ),
        (OptimizerSpec(Optimizer.SGD_MOMENTUM, foreach=True), DType.FLOAT32, 32),
        (OptimizerSpec(Optimizer.SGD, foreach=True), DType.FLOAT32, 12),
        # Clipping reads g for the norm, then reads and writes it.
        (OptimizerSpec(Optimizer.SGD, clips=True), DType.FLOAT32, 12 + 12),
        (OptimizerSpec(Optimizer.ADAMW, clips=True), DType.BFLOAT16, 14 + 6),
        # Read p, g twice, 2 * 10 statistics of 100 elements; write p and the statistics.
        (OptimizerSpec(Optimizer.ADAFACTOR), DType.FLOAT32, 16 + 2 * 4 * 0.2),
    ],
)
def test_updates_are_bound_by_memory(
    spec: OptimizerSpec, dtype: DType, bytes_per_element: float
) -> None:
    found = optimizer_time(spec, (10, 10), dtype, DEVICE)
    assert found == pytest.approx(100 * bytes_per_element / 1000.0)


def test_clipping_passes_over_gradients_twice() -> None:
    """Once for the norm, once for a product in place, although nothing has to be clipped."""
    gradient = torch.full((5, 7), 1e-3)
    parameter = torch.nn.Parameter(torch.ones(5, 7))
    parameter.grad = gradient
    with Touching(gradient) as touching:
        torch.nn.utils.clip_grad_norm_([parameter], max_norm=1.0)
    assert touching.operators == ["aten::_foreach_norm", "aten::_foreach_mul_"]


class Touching(TorchDispatchMode):
    """Records the operators that get a tensor, but for those that only look at its type."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(x is self.tensor for x in tensors):
            self.operators.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_plans_price_clipping_where_it_is_asked_for(planned: Planner) -> None:
    free, clipping = (
        planned(mlp(), (2,), algo="ddp", clip_gradients=clips) for clips in (False, True)
    )
    (stage,) = clipping.stages
    nbytes = sum(prod(p.local_shape) * 4 for p in stage.parameters)
    added = clipping.costs.optimizer - free.costs.optimizer
    assert added == pytest.approx(3 * nbytes / clipping.mesh.topology.device.stream_bandwidth)


@given(
    name=st.sampled_from(Optimizer),
    shape=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    parts=st.integers(1, 8),
)
def test_cutting_a_parameter_never_costs_more(
    name: Optimizer, shape: list[int], parts: int
) -> None:
    spec = OptimizerSpec(name)
    whole = [shape[0] * parts, *shape[1:]]
    for figure in (spec.state_nbytes, lambda s, d: optimizer_time(spec, s, d, DEVICE)):
        sharded = figure(shape, DType.FLOAT32)
        assert sharded <= figure(whole, DType.FLOAT32) <= parts * sharded * (1 + 1e-9)


def test_an_unknown_optimizer_is_refused_with_those_that_exist() -> None:
    assert OptimizerSpec.named("AdamW") == OptimizerSpec(Optimizer.ADAMW)
    with pytest.raises(OptionError, match="'lion' is unknown; choose one of none, sgd,"):
        OptimizerSpec.named("lion")
