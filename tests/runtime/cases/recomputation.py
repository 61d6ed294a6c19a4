"""Planned transformers that recompute: the same numbers, less memory, the collectives counted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import torch
from support import models
from support.comparison import check_collectives
from support.recomputation import (
    checkpointing,
    holding_everything,
    nodes_of,
    resharding_again,
    run_step,
)
from support.transformer_plans import (
    GPT2_LAYERS,
    LLAMA_LAYERS,
    checkpoints,
    everything_again,
    planned,
)

from autoshard.graph import graph_from_json
from autoshard.lowering import buckets as plan_buckets
from autoshard.lowering.buckets import buckets_of
from autoshard.plan import Plan, Resharding

TOLERANCE = 1e-10


def double(build: Callable[[], models.Case]) -> models.Case:
    """In double precision, where a difference of 1e-10 is a different computation."""
    model, inputs = build()
    wide = {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    return model.double(), wide


MODELS = {
    "gpt2": partial(double, models.gpt2),
    "noisy gpt2": partial(double, partial(models.gpt2, dropout=0.2)),
    "llama": partial(double, models.llama),
    "residuals": partial(double, models.residuals),
}
LAYERS = {
    "residuals": tuple(f"layers.{number}" for number in range(3)),
    "gpt2": GPT2_LAYERS,
    "noisy gpt2": GPT2_LAYERS,
    "llama": LLAMA_LAYERS,
}


def parameters(plan: Plan) -> Callable[[Resharding], bool]:
    names = {p.name for p in plan.stages[0].parameters}
    return lambda resharding: resharding.value in names


@dataclass
class Case:
    """A plan, and how it is edited."""

    model: str
    mesh: str
    options: str
    edit: Callable[[Plan, tuple[str, ...]], Plan]
    largest: int = plan_buckets.LARGEST
    """Bytes of a bucket."""
    plain: Plan = field(init=False)
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        with patch.object(plan_buckets, "LARGEST", self.largest):
            self._prepare()

    def __call__(self) -> None:
        with patch.object(plan_buckets, "LARGEST", self.largest):
            self._check()

    def _prepare(self) -> None:
        self.plain = holding_everything(planned(MODELS[self.model], self.mesh, self.options))
        edited = self.edit(self.plain, LAYERS[self.model])
        self.plan = Plan.from_json(edited.to_json())
        if self.largest < plan_buckets.SMALL:
            stage = self.plan.stages[0]
            found = buckets_of(stage, graph_from_json(stage.program))
            ahead = [b for b in found if b.checkpoint >= 0 and b.begins < b.reader]
            assert len(ahead) >= len(LAYERS[self.model])

    def _check(self) -> None:
        plain = run_step(self.plain, MODELS[self.model])
        whole = parameters(self.plan)
        # The last step of a gather makes the whole parameter; its slice is there anyway.
        made_anew = [
            c.steps[-1].nbytes for c in self.plan.stages[0].reshardings if c.regather and whole(c)
        ]
        wanted = plain.held // 2 if self.edit is checkpoints else plain.held - sum(made_anew)
        step = run_step(self.plan, MODELS[self.model], patient_until=wanted)
        torch.testing.assert_close(step.loss, plain.loss, rtol=TOLERANCE, atol=TOLERANCE)
        assert step.gradients.keys() == plain.gradients.keys()
        for name, gradient in plain.gradients.items():
            torch.testing.assert_close(
                step.gradients[name], gradient, rtol=TOLERANCE, atol=TOLERANCE, msg=name
            )
        check_collectives(plain.collectives, self.plain)
        check_collectives(step.collectives, self.plan)
        assert step.held <= wanted < plain.held


def again(plan: Plan, _layers: tuple[str, ...]) -> Plan:
    return resharding_again(plan, parameters(plan))


def one_of_each(plan: Plan, layers: tuple[str, ...]) -> Plan:
    """A checkpoint over the last layer, and `again` everywhere else."""
    stage = plan.stages[0]
    inside = {n.name for n in nodes_of(plan, layers[-1])}
    makers = {v: n.name for n in nodes_of(plan, "") for v in n.outputs}

    def outside(resharding: Resharding) -> bool:
        place = resharding.consumer or makers.get(resharding.value)
        return place not in inside

    assert {c.consumer for c in stage.reshardings} & inside
    return resharding_again(checkpointing(plan, layers[-1]), outside)


CASES = {
    f"{model} {mesh} {options} {edit.__name__}": Case(model, mesh, options, edit)
    for model, mesh, options, edit in [
        ("gpt2", "4", "fsdp", again),
        ("gpt2", "4", "fsdp", checkpoints),
        ("llama", "4", "fsdp", everything_again),
        ("llama", "2x2", "hsdp", again),
        ("llama", "2x2", "sequence", checkpoints),
        ("llama", "2x2", "sequence", everything_again),
        ("llama", "2x2", "sequence", one_of_each),
        ("noisy gpt2", "2x2", "megatron", checkpoints),
        ("noisy gpt2", "2x2", "sequence of gpt2", checkpoints),
        ("noisy gpt2", "2x2", "sequence of gpt2", everything_again),
    ]
} | {
    "residuals, one bucket of a checkpoint gathered ahead": Case(
        "residuals", "4", "fsdp of residuals", checkpoints, largest=128 * 32 * 8
    )
}
LONG = (
    "llama 2x2 hsdp again",
    "noisy gpt2 2x2 megatron checkpoints",
    "gpt2 4 fsdp checkpoints",
    "llama 2x2 sequence checkpoints",
    "llama 2x2 sequence everything_again",
    "noisy gpt2 2x2 sequence of gpt2 checkpoints",
)
"""Each edit, model and way to hold things is in one of the others."""
