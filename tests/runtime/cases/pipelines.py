"""Training in pipeline stages: losses, gradients and communication."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.comparison import TOLERANCE, close, device_mesh, whole
from support.cut_plans import Cut, pipeline_plan
from support.models import Case, bert, gpt2, graph_of, llama
from torch import nn

from autoshard.plan import Plan
from autoshard.runtime import parallelize


@dataclass
class Trained:
    """A step gives the loss and the gradients of the unsharded model, micro-batch by micro-batch.

    Attributes:
        build: a model with the arguments of a micro-batch.
        cut: how it is cut.
    """

    build: Callable[[], Case]
    cut: Cut
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        self.plan = pipeline_plan(graph_of(self.built()[0]), self.cut)

    def built(self) -> tuple[Case, list[dict[str, Any]]]:
        """The model, and the arguments of all micro-batches."""
        torch.manual_seed(0)
        model, inputs = self.build()
        others = [self.build()[1] for _ in range(self.cut.micro_batches - 1)]
        return (model, inputs), [inputs, *others]

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
    return result["loss"] if isinstance(result, Mapping) else result


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


ON_2 = {
    f"{name}, {schedule}": Trained(build, Cut(2, schedule))
    for name, build in (
        ("gpt2", partial(gpt2, batch=2)),
        ("llama", partial(llama, batch=2)),
        ("bert", partial(bert, batch=2)),
    )
    for schedule in ("GPipe", "1F1B")
}
