"""`auto_parallelize` on real ranks: a single-device script with one more statement."""

import contextlib
import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.devices import DEVICE
from support.models import Case, gpt2, llama, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import ViTConfig, ViTForImageClassification

from autoshard import auto_parallelize, export_model, full_tensor, get_context, make_plan
from autoshard.errors import (
    AutoshardError,
    MeshError,
    OptionError,
    PlanError,
)
from autoshard.mesh import make_mesh
from autoshard.runtime.parallelize import Planned

OPTIONS: dict[str, Any] = {"topology": "h100-sxm", "cache": False, "server": False}


def vit() -> Case:
    """A small vision transformer and its loss."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(
        **size, intermediate_size=64, image_size=32, patch_size=8, num_labels=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    return model, {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.arange(8)}


def losses(build: Callable[[], Case], *, parallel: bool, mesh: Any) -> list[float]:
    """The losses of a training script that is for one device, but for one statement."""
    torch.manual_seed(0)
    model, batch = build()
    if parallel:
        model = auto_parallelize(model, (), batch, mesh=mesh, skip_fully_replicated=True, **OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(full_tensor(loss.detach())))
    if parallel:
        assert any(isinstance(p, DTensor) for p in model.parameters())
    return found


def trains_as_on_one_device(build: Callable[[], Case], mesh: Any) -> Callable[[], None]:
    def case() -> None:
        expected = losses(build, parallel=False, mesh=None)
        torch.testing.assert_close(
            losses(build, parallel=True, mesh=mesh), expected, rtol=1e-4, atol=1e-5
        )

    return case


def a_device_mesh_of_the_program_is_used() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    trains_as_on_one_device(gpt2, mesh)()


def raises(error: type[AutoshardError], match: str, call: Callable[[], object]) -> None:
    """Every rank raises the same type of error, and no rank waits for another."""
    try:
        call()
    except error as found:
        assert match in str(found), found  # noqa: PT017  each rank is a plain process
    else:
        raise AssertionError(f"no {error.__name__}")
    dist.barrier()


def parallelize_mlp(**changed: Any) -> nn.Module:
    model, batch = mlp()
    return auto_parallelize(model, (), batch, **OPTIONS | changed)


class Branching(nn.Module):
    """Its forward cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if float(x.sum()) > 0 else x


def errors_of_the_planning_rank_are_raised_on_all() -> None:
    raises(OptionError, "did you mean 'memory_budget'", lambda: parallelize_mlp(memory_budgets=1))
    raises(PlanError, "memory", lambda: parallelize_mlp(memory="1KB"))
    raises(MeshError, "unknown", lambda: parallelize_mlp(topology="xyz"))
    branching = lambda: auto_parallelize(Branching(), (torch.ones(4),), **OPTIONS)  # noqa: E731
    raises(AutoshardError, "", branching)


def a_mesh_of_another_size_is_an_error() -> None:
    raises(MeshError, "4 ranks", lambda: parallelize_mlp(mesh=(2, 4)))


def an_error_of_one_rank_is_raised_on_all() -> None:
    def apply() -> object:
        model, batch = mlp()
        if dist.get_rank() == 3:
            del model.up
        return auto_parallelize(model, (), batch, **OPTIONS)

    raises(AutoshardError, "", apply)


def the_first_rank_says_in_a_line_what_was_planned() -> None:
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        parallelize_mlp(mesh=(2, 2))
    lines = [line for line in written.getvalue().splitlines() if line.startswith("autoshard: ")]
    assert len(lines) == (dist.get_rank() == 0)
    for line in lines:
        assert line.startswith("autoshard: mesh axis0=2 x axis1=2: ")
        assert "Predicted step: " in line
        assert "per device" in line
        assert "autoshard show" not in line, "the plan is not kept"


def the_plan_of_a_launch_is_used() -> None:
    model, batch = mlp()
    made = make_plan(export_model(model, (), batch), make_mesh((2, 2), topology="h100-sxm"))
    written = io.StringIO()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "plan.json"
        made.save(path)
        patch.setenv("AUTOSHARD_PLAN", str(path))
        patch.setenv("WORLD_SIZE", "4")
        get_context.cache_clear()
        patch.setattr("autoshard.automatic.export_model", None)
        with contextlib.redirect_stderr(written):
            planned = parallelize_mlp()
        raises(MeshError, "launched with a plan for axis0=2", lambda: parallelize_mlp(mesh=4))
    get_context.cache_clear()
    assert isinstance(planned, Planned)
    if dist.get_rank() == 0:
        assert f"Plan {made.id[:12]}, given to `autoshard launch`" in written.getvalue()


def the_service_of_the_environment_is_used() -> None:
    os.environ["AUTOSHARD_SERVER"] = "http://127.0.0.1:1"
    try:
        raises(AutoshardError, "", lambda: parallelize_mlp(server=None))
    finally:
        del os.environ["AUTOSHARD_SERVER"]


def the_default_topology_of_a_cpu_is_a_cpu() -> None:
    with warnings.catch_warnings():
        model = parallelize_mlp(topology=None, mesh=4)
    assert isinstance(model, Planned)


CASES: dict[str, Callable[[], None]] = {
    "gpt2": trains_as_on_one_device(gpt2, "2x2"),
    "llama": trains_as_on_one_device(llama, None),
    "vit": trains_as_on_one_device(vit, (2, 2)),
    "a device mesh": a_device_mesh_of_the_program_is_used,
    "errors of the planning rank": errors_of_the_planning_rank_are_raised_on_all,
    "a mesh of another size": a_mesh_of_another_size_is_an_error,
    "an error of one rank": an_error_of_one_rank_is_raised_on_all,
    "the line of the first rank": the_first_rank_says_in_a_line_what_was_planned,
    "the plan of a launch": the_plan_of_a_launch_is_used,
    "a service that does not answer": the_service_of_the_environment_is_used,
    "the default topology": the_default_topology_of_a_cpu_is_a_cpu,
}
LONG = ("llama", "vit")
"""A model of transformers is in the others."""
