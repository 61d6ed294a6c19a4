"""Training on eight ranks: many steps with a checkpoint between two plans; halves of a job."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from support import models
from support.comparison import close, mesh_of_ranks, whole
from support.training import Training
from support.transformer_plans import OPTIONS, planned

from autoshard.plan import Plan
from autoshard.runtime import parallelize


@dataclass(frozen=True)
class HalvesOfAJob:
    """A plan for four ranks on each half of the job, with groups of both of its axes."""

    build: Callable[[], models.Case]

    def prepare(self) -> None:
        assert any(each.axis == "dp+tp" for each in self._plan.collectives)

    @cached_property
    def _plan(self) -> Plan:
        return planned(self.build, "2x2", "sequence")

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference, inputs = self.build()
        mesh = mesh_of_ranks((2, 2, 2), ("half", "dp", "tp"))["dp", "tp"]
        model = parallelize(copy.deepcopy(reference), self._plan, mesh)
        loss, expected = model(**inputs).loss, reference(**inputs).loss
        close(whole(loss.detach()), expected.detach(), "loss")
        loss.backward()
        expected.backward()
        gradients = {name: each.grad for name, each in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            close(whole(parameter.grad), gradients[name], name)


CASES: dict[str, Callable[[], None]] = {
    "two halves of a job": HalvesOfAJob(models.llama),
    "gpt2, megatron to fsdp": Training(
        partial(models.gpt2, batch=8),
        (({"dp": 2, "tp": 4}, OPTIONS["megatron"]), ({"dp": 8}, OPTIONS["fsdp"])),
    ),
    "llama, hsdp to three axes": Training(
        partial(models.llama, batch=8),
        (({"dp": 2, "tp": 4}, OPTIONS["hsdp"]), ({"a": 2, "b": 2, "c": 2}, OPTIONS["free"])),
    ),
}
LONG = ("gpt2, megatron to fsdp",)
"""Other layouts of 8 ranks are in the other one."""
