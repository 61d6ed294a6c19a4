"""Training in pipeline stages: losses, gradients and communication."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.comparison import TOLERANCE, close, device_mesh, whole
from support.meshes import slow_devices
from support.models import Case, bert, gpt2, graph_of, llama, resnet, t5
from torch import nn

from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize


@dataclass
class Trained:
    """A step gives the loss and the gradients of the unsharded model, micro-batch by micro-batch.

    Attributes:
        build: a model with the arguments of a micro-batch.
        axes: of the mesh.
        options: of the plan.
    """

    build: Callable[[], Case]
    axes: Mapping[str, int]
    options: Mapping[str, Any]
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        options = PlanOptions.model_validate({"micro_batches": 4, **self.options})
        case, _ = self.built()
        self.plan = make_plan(graph_of(case), slow_devices(**self.axes), options)
        assert self.plan.found, self.plan.reason

    def built(self) -> tuple[Case, list[dict[str, Any]]]:
        """The model, and the arguments of all micro-batches."""
        torch.manual_seed(0)
        model, inputs = self.build()
        return (model, inputs), [inputs, *(self.build()[1] for _ in range(3))]

    def __call__(self) -> None:
        (reference, _), parts = self.built()
        losses = torch.stack([loss_of(reference(**part)) for part in parts])
        losses.mean().backward()
        (model, _), _ = self.built()
        planned = parallelize(model, self.plan, device_mesh(self.plan))
        for _ in range(2):
            loss = planned.step(**joined_batch(parts))
            close(loss, losses.detach().mean().double(), "loss")
            check_gradients(planned, reference)
            planned.zero_grad()


def loss_of(result: Any) -> torch.Tensor:
    """The loss among the results of forward."""
    loss: torch.Tensor = result["loss"] if isinstance(result, Mapping) else result
    return loss


def joined_batch(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of the whole batch."""
    return {
        name: torch.cat([part[name] for part in parts]) if isinstance(x, torch.Tensor) else x
        for name, x in parts[0].items()
    }


def check_gradients(planned: nn.Module, reference: nn.Module) -> None:
    """Each rank has the gradients of its stages, and all ranks together have all."""
    expected = dict(reference.named_parameters(remove_duplicate=False))
    own = dict(planned.named_parameters(remove_duplicate=False))
    for name, parameter in own.items():
        gradient = expected[name].grad
        if gradient is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        close(whole(parameter.detach()), expected[name].detach(), name, 0)
        close(whole(parameter.grad), gradient, f"gradient of {name}", TOLERANCE)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, sorted(own))
    assert {name for names in held for name in names} == expected.keys()


MODELS: Mapping[str, Callable[[], Case]] = {
    "gpt2": partial(gpt2, batch=4),
    "llama": partial(llama, batch=4),
    "bert": partial(bert, batch=4),
    "t5": partial(t5, batch=4),
    "resnet": partial(resnet, batch=4),
}

TP = {
    "gpt2": {
        "*.c_attn.weight": "S(1)/1+1+1",
        "*.mlp.c_fc.weight": "S(1)",
        "*c_proj.weight": "S(0)",
    },
    "llama": {"*.[qkv]_proj.weight": "S(0)", "*.up_proj.weight": "S(0)"},
}
LAYOUTS: Mapping[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pp4": ({"pp": 4}, {"stages": 4}),
    "pp2 dp2": ({"pp": 2, "dp": 2}, {"stages": 2, "batch_axis": "dp"}),
    "pp2 tp2": ({"pp": 2, "tp": 2}, {"stages": 2, "pins": {"inputs": {"*": "I"}}}),
}
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

ON_4 = {
    f"{name}, {layout}, {schedule}": Trained(build, axes, {"schedule": schedule, **options})
    for name, build in MODELS.items()
    for layout, (axes, options) in LAYOUTS.items()
    for schedule in ("GPipe", "1F1B")
} | {
    f"gpt2, {layout}, {schedule}": Trained(
        MODELS["gpt2"],
        axes,
        {"schedule": schedule, **options, "stages": 4},
    )
    for layout, (axes, options) in LAYOUTS.items()
    if layout != "pp4"
    for schedule in LOOPED
}
ON_2 = {
    f"{name}, pp2, {schedule}": Trained(
        build, {"pp": 2}, {"schedule": schedule, "stages": 4 if schedule in LOOPED else 2}
    )
    for name, build in MODELS.items()
    for schedule in ("GPipe", "1F1B", *LOOPED)
}
