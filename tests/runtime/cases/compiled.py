"""Planned models under `torch.compile`, on two ranks: compiling takes far longer than a step."""

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from runtime.cases import gradients
from runtime.cases.gradients import MIXED, MLP, compare_gradients, loss_of
from runtime.cases.mixed_precision import F32, F64, Mixed
from support import models
from support.comparison import close, device_mesh, whole
from support.transformer_plans import OPTIONS
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.plan import Plan
from autoshard.runtime import CollectiveRecord, parallelize, record_collectives, rng_step, summarize

small_gpt2 = partial(models.gpt2, layers=1)


def _import_compiler() -> None:
    """Compile something once before there are ranks: most of the time of the first is imports."""
    one = torch.compile(nn.Linear(1, 1), fullgraph=True, backend="aot_eager")
    one(torch.ones(1, 1)).sum().backward()


def compiled(reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]) -> None:
    """The planned model is one graph to `torch.compile`, compiled once, and computes the same."""
    # The tracer makes an object of each function of autograd, which torch itself warns of.
    warnings.filterwarnings("ignore", ".*autograd.function.Function", DeprecationWarning)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(planned, fullgraph=True, backend=counter)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (planned, reference)]
    for _ in range(20):
        losses = [loss_of(model, inputs) for model in (run, reference)]
        close(whole(losses[0].detach()), losses[1].detach(), "loss")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert counter.frame_count == 1
    compare_gradients(reference, planned, 1e-4)


def compiled_with_dropout(
    _reference: nn.Module, planned: nn.Module, inputs: dict[str, Any]
) -> None:
    """Compiled once, the planned model draws the numbers that it draws uncompiled."""
    warnings.filterwarnings("ignore", ".*autograd.function.Function", DeprecationWarning)
    counter = CompileCounterWithBackend("aot_eager")
    twin = deepcopy(planned)
    models = (torch.compile(planned, fullgraph=True, backend=counter), twin)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (planned, twin)]
    mesh = next(planned.parameters()).device_mesh
    seen = []
    for _ in range(20):
        moved = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with record_collectives(mesh) as recorder:
                loss = loss_of(model, inputs)
                loss.backward()
            optimizer.step()
            seen.append(float(loss.detach()))
            moved.append(_bytes_of(recorder.records))
        assert moved[0] == moved[1]
    assert counter.frame_count == 1
    assert rng_step(planned).value == rng_step(twin).value == 20
    assert seen[::2] == pytest.approx(seen[1::2], rel=1e-5)
    assert max(seen) - min(seen) > 1e-3
    for name, parameter in twin.named_parameters():
        close(whole(planned.get_parameter(name).grad), whole(parameter.grad), name, 1e-4)


def _bytes_of(records: Sequence[CollectiveRecord]) -> dict[tuple[str, str, str], int]:
    """Bytes by kind, axis and direction; a compiled model runs those of a bucket one by one."""
    return {(c.kind, c.axis, c.direction): c.nbytes for c in summarize(records)}


@dataclass
class Case(gradients.Case):
    """A planned model that is compiled, beside one that is not."""

    ranks: int = 2

    def prepare(self) -> None:
        _import_compiler()
        super().prepare()


@dataclass
class MixedPrecision:
    """A compiled step in mixed precision has the gradients of one that is not compiled."""

    plan: Plan = field(init=False)

    def prepare(self) -> None:
        _import_compiler()
        mixed = Mixed({"a": 2}, MixedPrecisionPolicy(F32, F64), small_gpt2, double=True)
        mixed.prepare()
        self.plan = mixed.plan

    def __call__(self) -> None:
        # The tracer makes an object of each function of autograd, which torch itself warns of.
        warnings.filterwarnings("ignore", ".*autograd.function.Function", DeprecationWarning)
        torch.manual_seed(0)
        model, batch = small_gpt2()
        found = []
        for compiles in (False, True):
            planned = parallelize(deepcopy(model).double(), self.plan, device_mesh(self.plan))
            run = torch.compile(planned, backend="aot_eager", fullgraph=True)
            (run if compiles else planned)(**batch)["loss"].backward()
            found.append({name: p.grad.full_tensor() for name, p in planned.named_parameters()})
        for name, gradient in found[0].items():
            assert found[1][name].dtype is F64
            close(found[1][name], gradient, f"gradient of {name}", 2e-5)


CASES: dict[str, Callable[[], None]] = {
    "parameters cut": Case(MLP, compiled, models.mlp),
    "parameters gathered in checkpoints": Case(
        OPTIONS["fsdp of residuals"] | {"activation_checkpointing": "always"},
        compiled,
        models.residuals,
    ),
    "dropout": Case(MIXED, compiled_with_dropout, partial(small_gpt2, dropout=0.2)),
    "mixed precision": MixedPrecision(),
}
